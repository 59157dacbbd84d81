"""Benchmarks across nodes, and predictions for clusters. They are not part of the package.

Run `python -m benchmarks` in a clone. `testbed/` plays several nodes on one machine; tests use it.
"""
