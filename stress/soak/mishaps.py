"""Groups that fail as expected on every rank: their resources must be returned as well."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sdp_plugins.core import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    SdpError,
)
from stress.soak.turn import Mismatch, Started, Turn


def mishap(turn: Turn) -> Started:
    """Create a group of all ranks and make it fail."""
    spoil, expected = turn.plan.choice(WAYS)
    odd = turn.plan.randrange(turn.world)
    group = dist.new_group(timeout=timedelta(seconds=60))
    try:
        if turn.world > 1:
            expect(expected, spoil, turn, group, odd)
    finally:
        dist.destroy_process_group(group)
    return Started(None, lambda: None)


def expect(errors: Any, call: Callable[..., Any], turn: Turn, group: Any, odd: int) -> None:
    try:
        call(turn, group, odd)
    except errors:
        return
    except SdpError as error:
        raise Mismatch(f"{call.__name__} raised {error!r}") from error
    if not (call is leave_early and turn.rank == odd):
        raise Mismatch(f"{call.__name__} raised nothing")


def other_size(turn: Turn, group: Any, odd: int) -> None:
    count = turn.count(4) + 2 + (turn.rank == odd)
    works = [dist.all_reduce(torch.zeros(3), group=group, async_op=True) for _ in range(3)]
    dist.all_reduce(torch.zeros(count), group=group)
    del works


def other_operation(turn: Turn, group: Any, odd: int) -> None:
    tensor = torch.zeros(turn.count(4))
    if turn.rank == odd:
        dist.broadcast(tensor, group=group, group_src=0)
    else:
        dist.all_reduce(tensor, group=group)


def leave_early(turn: Turn, group: Any, odd: int) -> None:
    dist.barrier(group)
    if turn.rank == odd:
        return
    dist.barrier(group, async_op=True).wait()


def come_late(turn: Turn, group: Any, odd: int) -> None:
    """Make one rank late, so that it finds that the others have given up."""
    dist.barrier(group)
    if turn.rank == odd:
        dist.barrier(turn.group)
        dist.barrier(group)  # the others joined this barrier, and then gave up
        dist.barrier(group)
        return
    try:
        dist.barrier(group, timeout=timedelta(milliseconds=20))
    finally:
        dist.barrier(turn.group)


WAYS = (
    (other_size, CollectiveMismatchError),
    (other_operation, CollectiveMismatchError),
    (leave_early, PeerLostError),
    (come_late, CollectiveTimeoutError),
)
