"""What TORCH_DISTRIBUTED_DEBUG=DETAIL adds: each call in the log, before it runs.

torch's own checks under DETAIL are not needed: the core compares what the ranks call in every
operation.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from sdp_plugins.core import Group
from sdp_plugins.torch.options import Start

log = logging.getLogger(__name__)


def is_on() -> bool:
    """Whether the program is to be watched in detail."""
    return get_debug_level() == DebugLevel.DETAIL


def logged(
    group: Group, name: str, starts: Sequence[Start], tensors: Sequence[Tensor]
) -> list[Start]:
    """Operations of a call that log themselves when they are started: rank, number, shapes.

    Args:
        group: Where they run.
        name: Of the call.
        starts: Of the operations.
        tensors: One for each operation, or else all of them are each one's.
    """
    each = [[tensor] for tensor in tensors]
    if len(each) != len(starts):
        each = [list(tensors)] * len(starts)
    return [
        partial(_log_and_start, group, name, own, start)
        for own, start in zip(each, starts, strict=True)
    ]


def _log_and_start(
    group: Group, name: str, tensors: Sequence[Tensor], start: Start, **how: Any
) -> Any:
    log_call(group, name, tensors)
    return start(**how)


def log_call(group: Group, name: str, tensors: Sequence[Tensor]) -> None:
    """Log the group's next collective."""
    _log(group, f"{name} #{group.issued + 1}", tensors)


def log_message(group: Group, name: str, tensor: Tensor, peer: int | None, tag: int) -> None:
    """Log a message.

    Args:
        group: The ranks.
        name: Of the operation.
        tensor: Its bytes.
        peer: The other rank; None: any.
        tag: The message's.
    """
    whom = "any rank" if peer is None else f"rank {group.number(peer)}"
    _log(group, f"{name} {'to' if name == 'send' else 'from'} {whom} tag {tag}", [tensor])


def _log(group: Group, what: str, tensors: Sequence[Tensor]) -> None:
    if log.isEnabledFor(logging.INFO):
        shapes = ", ".join(
            f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors
        )
        log.info("%s", f"{group.head}{what} {shapes}".rstrip())
