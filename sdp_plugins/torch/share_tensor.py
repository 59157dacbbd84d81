"""Shared memory for tensors of which only their owner knows that they may move."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from sdp_plugins.torch.reductions import Reductions


def share(tensor: Tensor, group: Any = None) -> None:
    """Move a tensor's storage into shared memory, in place: all_reduce on it copies nothing.

    Every rank of the group has to do this with its tensor, or all of them go on copying. DDP's
    buckets need no call; they move by themselves.

    All tensors that view the storage follow. Afterwards addresses that were taken before (data_ptr,
    DLPack, the buffer of an operation that runs in another thread) are void, the storage cannot be
    resized, and forked children share it instead of getting a copy. Memory that is shared already
    stays where it is. With SDP_REGISTER=0, in a group of one rank and below 1 MiB nothing happens.

    Args:
        tensor: A contiguous CPU tensor that no operation is working on.
        group: A group of smddp that will reduce it; None is the default group. A tensor may be
            shared with several groups.

    Raises:
        ValueError: Its memory may not move, because NumPy refers to it for example; or the group
            is not one of smddp.
        SharedMemoryError: There is not enough memory.
    """
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, Reductions):
        raise ValueError(
            f"share() needs a group of smddp, not {chosen!r}. "
            'Hint: call init_process_group("smddp") before.'
        )
    chosen.share(tensor)
