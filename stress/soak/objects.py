"""Object collectives, which consist of several collectives."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from stress.soak.turn import Mismatch, Started, Turn


def thing(turn: Turn, rank: int) -> Any:
    """Return a rank's object."""
    return {"operation": turn.index, "rank": rank, "text": "x" * (turn.index * 37 % 5000 * rank)}


def same(actual: Any, expected: Any) -> None:
    if actual != expected:
        raise Mismatch("an object differs")


def all_gather_object(turn: Turn) -> Started:
    found: list[Any] = [None] * turn.world
    dist.all_gather_object(found, thing(turn, turn.rank), turn.group)
    same(found, [thing(turn, r) for r in turn.everyone])
    return Started(None, lambda: None)


def broadcast_object_list(turn: Turn) -> Started:
    root = turn.plan.randrange(turn.world)
    given = [thing(turn, root), turn.index, "a text"]
    objects: list[Any] = list(given) if turn.rank == root else [None] * 3
    dist.broadcast_object_list(objects, group=turn.group, group_src=root)
    same(objects, given)
    return Started(None, lambda: None)


def gather_object(turn: Turn) -> Started:
    root = turn.plan.randrange(turn.world)
    found: Any = [None] * turn.world if turn.rank == root else None
    dist.gather_object(thing(turn, turn.rank), found, group=turn.group, group_dst=root)
    if turn.rank == root:
        same(found, [thing(turn, r) for r in turn.everyone])
    return Started(None, lambda: None)


def scatter_object_list(turn: Turn) -> Started:
    root = turn.plan.randrange(turn.world)
    whole = [thing(turn, r) for r in turn.everyone] if turn.rank == root else None
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, whole, group=turn.group, group_src=root)
    same(mine, [thing(turn, turn.rank)])
    return Started(None, lambda: None)


def send_object_list(turn: Turn) -> Started:
    if turn.world == 1:
        return Started(None, lambda: None)
    src, dst = turn.plan.sample(turn.everyone, 2)
    if turn.rank == src:
        dist.send_object_list([thing(turn, src), 1.5], group=turn.group, group_dst=dst)
    elif turn.rank == dst:
        objects: list[Any] = [None, None]
        dist.recv_object_list(objects, group=turn.group, group_src=src)
        same(objects, [thing(turn, src), 1.5])
    return Started(None, lambda: None)
