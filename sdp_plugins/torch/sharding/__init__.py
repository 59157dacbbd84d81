"""Weights once per node, gradients reduced to shards, torch's optimizer on this rank's shard."""
