"""Callbacks of futures that communicate, concurrently with the main thread."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from stress.soak.turn import Started, Turn
from tests.core.values import Array


def chained(turn: Turn) -> Started:
    """Run chained reductions: each callback reduces the previous operation's result again."""
    count = turn.count(4)
    inputs = [turn.values("float32", count, r) for r in turn.everyone]
    tensor = turn.tensor("float32", inputs[turn.rank])

    def again(future: Any) -> Any:
        (result,) = future.value()
        dist.all_reduce(result, group=turn.group)
        return result

    first = dist.all_reduce(tensor, group=turn.group, async_op=True).get_future()
    beside = turn.tensor("float32", inputs[turn.rank])
    dist.all_reduce(beside, group=turn.group)
    last = first.then(again)

    def check() -> None:
        once: Array = turn.reduced("float32", "sum", inputs)
        turn.equal(beside, once, "what the main thread reduced")
        turn.equal(last.value(), turn.reduced("float32", "sum", [once] * turn.world), "a callback")

    return Started(last, check)


def many(turn: Turn) -> Started:
    """Run several futures with callbacks that record their order only."""
    order: list[int] = []
    works = []
    for number in range(turn.plan.randrange(1, 6)):
        work = dist.all_reduce(torch.ones(3), group=turn.group, async_op=True)
        works.append(work.get_future().then(lambda _, n=number: order.append(n)))

    def check() -> None:
        assert order == sorted(order) == list(range(len(works))), order

    return Started(works[-1], check)
