"""SMDDP 1.0 to 1.3's collectives; deprecated since 1.4."""

import warnings

from sdp_plugins.torch.v1.distributed import (
    ReduceOp,
    all_gather,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    get_local_rank,
    get_rank,
    get_world_size,
    group,
    init_process_group,
    is_available,
    is_initialized,
    reduce,
)

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "is_available",
    "is_initialized",
    "reduce",
]

warnings.warn(
    "smdistributed.dataparallel.torch.distributed is deprecated. "
    'Hint: use torch.distributed.init_process_group("smddp").',
    DeprecationWarning,
    stacklevel=2,
)
