"""SMDDP's API for TensorFlow, on the core's collectives.

::

    import sdp_plugins.tensorflow as sdp

    sdp.init()
    with tf.GradientTape() as tape:
        loss = ...
    tape = sdp.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
"""

from typing import TYPE_CHECKING, Any

from .compression import Compression, FP16Compression, NoneCompression
from .functions import (
    ReduceOp,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    init,
    local_rank,
    local_size,
    oob_allreduce,
    overlap,
    rank,
    shutdown,
    size,
)
from .optimizer import DistributedOptimizer
from .session_hooks import BroadcastGlobalVariablesHook
from .tape import DistributedGradientTape
from .worker_comm import WorkerComm, get_worker_comm

if TYPE_CHECKING:
    from .strategy import SMDDPStrategy as SMDDPStrategy

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "FP16Compression",
    "NoneCompression",
    "ReduceOp",
    "WorkerComm",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_variables",
    "get_worker_comm",
    "init",
    "local_rank",
    "local_size",
    "oob_allreduce",
    "overlap",
    "rank",
    "shutdown",
    "size",
]


def __getattr__(name: str) -> Any:
    # Not in __all__: only users of the strategy need TensorFlow's private names.
    if name == "SMDDPStrategy":
        from .strategy import SMDDPStrategy

        return SMDDPStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
