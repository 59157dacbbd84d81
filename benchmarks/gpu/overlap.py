"""In a rank: reductions beside a computation that needs nothing but time, as in a backward pass."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.task import Rank

CYCLES_PER_S = 1e9  # roughly a GPU's clock; what the computation takes is measured


def backward_us(
    rank: Rank, buckets: int, nbytes: int, seconds: float, compute: bool, reduce: bool
) -> float:
    """Return the microseconds of a pass that computes, and reduces a bucket after each part.

    Args:
        rank: This rank.
        buckets: Number of parts, and of buckets.
        nbytes: Size of a bucket.
        seconds: What a part takes on the device.
        compute: Whether to compute.
        reduce: Whether to reduce.
    """
    tensors = rank.kept.setdefault(
        f"overlap {buckets} {nbytes}",
        [torch.zeros(nbytes // 4, device=rank.device.torch) for _ in range(buckets)],
    )
    rank.meet()
    start, works = time.perf_counter(), []
    for tensor in tensors:
        if compute:
            _spend(rank, seconds)
        if reduce:
            works.append(dist.all_reduce(tensor, group=rank.group, async_op=True))
    for work in works:
        work.wait()
    rank.device.synchronize()
    return 1e6 * (time.perf_counter() - start)


def _spend(rank: Rank, seconds: float) -> None:
    """Enqueue a kernel that takes a while and no memory."""
    if rank.device.kind == "cuda":
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))
    else:
        module: Any = torch.get_device_module(rank.device.torch)
        module.spin(seconds)
