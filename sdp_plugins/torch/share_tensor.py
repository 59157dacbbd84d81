"""Shared memory for tensors that only their owner knows to be movable."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from sdp_plugins.torch.groups import smddp_group


def share(tensor: Tensor, group: Any = None) -> None:
    """Move a tensor's storage into shared memory, in place, so that all_reduce needs no copy.

    Every rank of the group has to call this for its tensor; otherwise all ranks continue to copy.
    DDP's buckets move automatically.

    All tensors that view the storage follow. Addresses taken earlier (data_ptr, DLPack, the buffer
    of an operation in another thread) become invalid, the storage cannot be resized, and forked
    children share it instead of getting a copy. Memory that is already shared stays where it is.
    The call has no effect with SDP_REGISTER=0, in a group of one rank, and below 1 MiB.

    Args:
        tensor: A contiguous CPU tensor without operations in flight.
        group: The smddp group that will reduce the tensor; None means the default group. A tensor
            may be shared with several groups.

    Raises:
        ValueError: The memory may not move, for example because NumPy refers to it; or the backend
            of the group is not smddp.
        SharedMemoryError: There is not enough memory.
    """
    chosen = smddp_group(group)
    if chosen is None:
        raise ValueError(
            f"share() needs a group of smddp, not {group or dist.group.WORLD!r}. "
            'Hint: call init_process_group("smddp") first.'
        )
    chosen.share(tensor)
