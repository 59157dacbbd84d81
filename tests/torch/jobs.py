"""What the ranks of these tests share.

DDP imports torch._dynamo, and assert_close imports DTensor: for seconds, in each rank that is
forked, unless the process that forks them has imported both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.tensor

DTYPES = [
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
]
BIG = 600_000  # elements of float32, 2.3 MiB: large enough for shared memory


@contextmanager
def process_group(backend: str = "smddp", **options: Any) -> Iterator[Any]:
    """The default group, as a script that was started by a launcher makes it."""
    dist.init_process_group(backend, **options)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def meet_over_the_store(rank: int, world: int) -> None:
    """A barrier for ranks whose groups have failed; rank 0, which serves the store, leaves last."""
    store = dist.distributed_c10d._get_default_store()
    for step, ranks in (("come", range(world)), ("gone", range(1, world))):
        store.set(f"{step} {rank}", "")
        if step == "come" or rank == 0:
            store.wait([f"{step} {other}" for other in ranks])


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A rank's data: small whole numbers, so that every dtype holds results exactly."""
    return (torch.arange(count) % 5 + rank + 1).to(dtype)


def total(world: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The sum of all ranks' `values`."""
    return (world * (torch.arange(count) % 5 + 1) + world * (world - 1) // 2).to(dtype)


def assert_same(actual: Any, expected: Any) -> None:
    """Fail unless two tensors, or two lists of them, are equal bit by bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def reduce(tensor: torch.Tensor, rank: int, world: int) -> str:
    """Fill, reduce, check; the path."""
    tensor.copy_(values(rank, tensor.numel()).view(tensor.shape))
    dist.all_reduce(tensor)
    assert_same(tensor, total(world, tensor.numel()).view(tensor.shape))
    return str(dist.group.WORLD.last_path)


def is_shared(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().is_shared()
