"""TORCH_DISTRIBUTED_DEBUG=DETAIL: a log of all calls, and a comparison of shapes.

The comparison of shapes is the only check of torch's DETAIL mode that the core lacks: the core
compares all other properties in every operation.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import DebugLevel, get_debug_level

from sdp_plugins.core import CollectiveMismatchError, Group
from sdp_plugins.core.errors import name_ranks
from sdp_plugins.torch.options import Launch

log = logging.getLogger("sdp_plugins.torch.detail")  # the name in the documentation


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
    """Compare the shapes of a call's tensors with those of the other ranks.

    Args:
        group: The group of the call.
        checks: Another group of the same ranks, which carries the comparison.
        name: The name of the call.
        tensors: The tensors to compare. Ranks that make another call or pass other sizes are
            left to the core, whose errors say more.
        timeout_s: How long to wait for the other ranks; None means the group's timeout.

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


def logged(
    group: Group, name: str, launches: Sequence[Launch], tensors: Sequence[Tensor]
) -> list[Launch]:
    """Wrap a call's operations so that each logs rank, number and shapes when it starts.

    Args:
        group: The group of the call.
        name: The name of the call.
        launches: The launches of the operations.
        tensors: One tensor for each operation; otherwise every operation uses all of them.
    """
    each = [[tensor] for tensor in tensors]
    if len(each) != len(launches):
        each = [list(tensors)] * len(launches)
    return [
        partial(_log_and_start, group, name, own, launch)
        for own, launch in zip(each, launches, strict=True)
    ]


def _log_and_start(
    group: Group, name: str, tensors: Sequence[Tensor], launch: Launch, **how: Any
) -> Any:
    log_call(group, name, tensors)
    return launch(**how)


def log_call(group: Group, name: str, tensors: Sequence[Tensor]) -> None:
    """Log the group's next collective."""
    _log(group, f"{name} #{group.issued + 1}", tensors)


def log_message(group: Group, name: str, tensor: Tensor, peer: int | None, tag: int) -> None:
    """Log a point-to-point message.

    Args:
        group: The group of the message.
        name: The name of the operation.
        tensor: The tensor that holds the data.
        peer: The other rank; None means any rank.
        tag: The tag of the message.
    """
    whom = "any rank" if peer is None else f"rank {group.global_rank(peer)}"
    _log(group, f"{name} {'to' if name == 'send' else 'from'} {whom} tag {tag}", [tensor])


def _log(group: Group, what: str, tensors: Sequence[Tensor]) -> None:
    if log.isEnabledFor(logging.INFO):
        shapes = ", ".join(
            f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors
        )
        log.info("%s", f"{group.error_prefix}{what} {shapes}".rstrip())
