"""Collectives on a tensor of any device, as functions of a rank's input that return the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Collective = Callable[[Tensor, int, int, Any], list[Tensor]]
ROOT = 0


def broadcast(x: Tensor, rank: int, ranks: int, group: Any) -> list[Tensor]:
    """The last rank's."""
    dist.broadcast(x, ranks - 1, group=group)
    return [x]


def reduce(x: Tensor, rank: int, ranks: int, group: Any) -> list[Tensor]:
    """The root's sum."""
    dist.reduce(x, ROOT, group=group)
    return [x] if rank == ROOT else []


def all_gather(x: Tensor, rank: int, ranks: int, group: Any) -> list[Tensor]:
    """One tensor for each rank."""
    found = [torch.zeros_like(x) for _ in range(ranks)]
    dist.all_gather(found, x, group=group)
    return found


def all_gather_into_tensor(x: Tensor, rank: int, ranks: int, group: Any) -> list[Tensor]:
    """All ranks' in one tensor."""
    found = x.new_zeros(ranks * x.numel())
    dist.all_gather_into_tensor(found, x, group=group)
    return [found]


def reduce_scatter_tensor(x: Tensor, rank: int, ranks: int, group: Any) -> list[Tensor]:
    """This rank's part of the sum."""
    found = x.new_zeros(x.numel() // ranks)
    dist.reduce_scatter_tensor(found, x, group=group)
    return [found]


def all_to_all_single(x: Tensor, rank: int, ranks: int, group: Any) -> list[Tensor]:
    """A part from each rank."""
    found = torch.zeros_like(x)
    dist.all_to_all_single(found, x, group=group)
    return [found]


def gather(x: Tensor, rank: int, ranks: int, group: Any) -> list[Tensor]:
    """All ranks', at the root."""
    found = [torch.zeros_like(x) for _ in range(ranks)] if rank == ROOT else None
    dist.gather(x, found, ROOT, group=group)
    return found or []


def scatter(x: Tensor, rank: int, ranks: int, group: Any) -> list[Tensor]:
    """A part of the root's."""
    found = x.new_zeros(x.numel() // ranks)
    parts = [part.contiguous() for part in x.chunk(ranks)] if rank == ROOT else None
    dist.scatter(found, parts, ROOT, group=group)
    return [found]


def send_and_receive(x: Tensor, rank: int, ranks: int, group: Any) -> list[Tensor]:
    """The first rank's, at the second, and back."""
    if rank > 1 or ranks == 1:
        return []
    first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
    first(x, 1 - rank, group=group)
    second(x, 1 - rank, group=group)
    return [x]


COLLECTIVES: dict[str, Collective] = {
    call.__name__: call
    for call in (
        broadcast,
        reduce,
        all_gather,
        all_gather_into_tensor,
        reduce_scatter_tensor,
        all_to_all_single,
        gather,
        scatter,
        send_and_receive,
    )
}
