"""SMDDP's names for Keras."""

from sdp_plugins.tensorflow.keras import (
    Compression,
    DistributedOptimizer,
    callbacks,
    init,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "callbacks",
    "init",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
