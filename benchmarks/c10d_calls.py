"""Every collective of torch.distributed on plain tensors, as a callable to time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ITEMSIZE = 4
Call = Callable[[], object]


def make(operation: str, group: Any, nbytes: int) -> Call:
    """Return a call of torch.distributed, with its own tensors.

    Args:
        operation: Its name in torch.distributed, or ``send_and_receive``.
        group: A group of torch.distributed.
        nbytes: Bytes of a rank's input, over all parts if it has a part for each rank.
    """
    ranks, root = dist.get_world_size(group), dist.get_rank(group) == 0
    part = max(1, nbytes // ITEMSIZE // ranks)
    whole, piece = torch.zeros(part * ranks), torch.zeros(part)

    def pieces() -> list[Tensor]:
        return [torch.zeros_like(piece) for _ in range(ranks)]

    def wholes() -> list[Tensor]:
        return [torch.zeros_like(whole) for _ in range(ranks)]

    arguments: dict[str, Callable[[], tuple[Any, ...]]] = {
        "all_reduce": lambda: (whole,),
        "reduce": lambda: (whole, 0),
        "broadcast": lambda: (whole, 0),
        "all_gather": lambda: (wholes(), whole),
        "all_gather_into_tensor": lambda: (torch.cat(wholes()), whole),
        "gather": lambda: (whole, wholes() if root else None, 0),
        "scatter": lambda: (piece, pieces() if root else None, 0),
        "reduce_scatter": lambda: (piece, pieces()),
        "reduce_scatter_tensor": lambda: (piece, whole),
        "all_to_all": lambda: (pieces(), pieces()),
        "all_to_all_single": lambda: (torch.zeros_like(whole), whole),
        "barrier": lambda: (),
    }
    if operation == "send_and_receive":
        return _there_and_back(whole, group)
    return partial(getattr(dist, operation), *arguments[operation](), group=group)


def _there_and_back(tensor: Tensor, group: Any) -> Call:
    """Return a round trip between the first two ranks; the other ranks do nothing."""
    rank = dist.get_rank(group)
    if rank > 1:
        return lambda: None
    first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)

    def there_and_back() -> None:
        first(tensor, 1 - rank, group=group)
        second(tensor, 1 - rank, group=group)

    return there_and_back
