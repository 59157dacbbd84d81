"""In a rank: the CPU's part in reductions, for a rank that has no GPU.

Ranks that share a GPU take turns on it, and share its link. Where there is one GPU only, rank 0 has
it to itself if the other ranks' CPUs do what theirs would do after each copy from a device: the
core's all_reduce of every piece, in shared memory.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.task import Rank
from sdp_plugins.core import Buffer, DType
from sdp_plugins.torch.accelerator.pieces import piece_sizes
from sdp_plugins.torch.accelerator.pinned_ring import SLOT_NBYTES, SLOTS

KEPT = "peer"


def play(rank: Rank, on: bool) -> None:
    """Let all ranks but the first do the CPU's part of reductions only, or no longer."""
    dist.all_reduce(torch.zeros(1, device=rank.device.torch), group=rank.group)  # the first agrees
    rank.plays = on and rank.place.rank != 0


def reduce(rank: Rank, sizes: list[int]) -> None:
    """Do the CPU's part of reductions of float32 tensors, with as many in flight as have room."""
    group, memory = rank.kept.get(KEPT) or rank.kept.setdefault(KEPT, _prepare(rank))
    works: deque[Any] = deque()
    pieces = [piece for nbytes in sizes for piece in piece_sizes(nbytes)]
    for number, piece in enumerate(pieces):
        if len(works) == SLOTS:
            works.popleft().wait()
        address = memory.data_ptr() + number % SLOTS * SLOT_NBYTES
        buffer = Buffer(address, piece // 4, DType.float32, memory)
        works.append(group.all_reduce(buffer, async_op=True))
    for work in works:
        work.wait()


def _prepare(rank: Rank) -> tuple[Any, Tensor]:
    """Return the Group whose operations the reductions of device tensors are, and memory."""
    group = rank.group._calls_on_device()._make_group("device reductions")
    return group, torch.frombuffer(group.allocate(SLOTS * SLOT_NBYTES), dtype=torch.uint8)
