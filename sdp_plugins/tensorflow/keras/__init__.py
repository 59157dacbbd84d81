"""SMDDP's API for programs that train with Keras and its callbacks, as with Horovod.

``sdp_plugins.keras.SMDDPStrategy`` does more automatically: global batches, metrics, files.
"""

from sdp_plugins.tensorflow import (
    Compression,
    DistributedOptimizer,
    init,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

from . import callbacks

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
