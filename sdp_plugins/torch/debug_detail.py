"""TORCH_DISTRIBUTED_DEBUG=DETAIL: a comparison of shapes.

It is the only check of torch's DETAIL mode that the core lacks: the core compares all other
properties in every operation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import DebugLevel, get_debug_level

from sdp_plugins.core import CollectiveMismatchError, Group
from sdp_plugins.core.rank_names import name_ranks


def is_on() -> bool:
    """Return whether TORCH_DISTRIBUTED_DEBUG=DETAIL is set."""
    return get_debug_level() == DebugLevel.DETAIL


_OF_OUTPUTS = ("all_reduce", "broadcast", "reduce", "scatter", "reduce_scatter")
_OF_INPUTS = ("all_gather", "gather")


def compared(name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors of a call whose shapes must be equal on all ranks."""
    if any(len({tensor.shape for tensor in tensors}) > 1 for tensors in (outputs, inputs)):
        return ()  # part sizes differ between ranks
    return outputs if name in _OF_OUTPUTS else inputs if name in _OF_INPUTS else ()


def compare_shapes(
    group: Group, checks: Group, name: str, tensors: Sequence[Tensor], timeout_s: float | None
) -> None:
    """Compare the shapes of a call's tensors with those of the other ranks, in the group `checks`.

    Ranks that make another call or pass other sizes are left to the core, whose errors say more.

    Raises:
        CollectiveMismatchError: The shapes differ; the call has not begun.
    """
    mine: list[Any] = [name, [list(tensor.shape) for tensor in tensors]]
    blobs = checks.exchange(json.dumps(mine).encode(), timeout_s)
    everyone = [json.loads(blob) for blob in blobs]
    others = [rank for rank, theirs in enumerate(everyone) if _differ_in_shape(mine, theirs)]
    if others:
        number, theirs = group.issued + 1, everyone[others[0]][1]
        raise CollectiveMismatchError(
            f"{group.error_prefix}{name} #{number}: shapes differ: {_listed(mine[1])} here, "
            f"{_listed(theirs)} on {name_ranks(map(group.global_rank, others))}. "
            "Hint: all ranks have to pass tensors of one shape while "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL is set.",
            ranks=others,
            op=name,
            seq=number,
        )


def _differ_in_shape(mine: list[Any], theirs: list[Any]) -> bool:
    """Return whether two calls differ in shapes and in nothing else."""
    same = mine[0] == theirs[0] and [*map(math.prod, mine[1])] == [*map(math.prod, theirs[1])]
    return same and mine[1] != theirs[1]


def _listed(shapes: list[list[int]]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes)
