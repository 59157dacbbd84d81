"""The plan of a soak: the next step of all ranks, from seed and index only."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stress.soak import (
    buckets,
    callbacks,
    core_share,
    messages,
    mishaps,
    moves,
    objects,
    reductions,
)
from stress.soak.turn import Started, Turn

Operation = Callable[[Turn], Started]

MOST_GROUPS = 6
MOST_IN_FLIGHT = 12

WEIGHTS: dict[Operation, int] = {
    reductions.all_reduce: 12,
    reductions.all_reduce_coalesced: 4,
    reductions.reduce: 5,
    reductions.reduce_scatter: 5,
    reductions.reduce_scatter_tensor: 5,
    moves.broadcast: 5,
    moves.all_gather: 5,
    moves.all_gather_into_tensor: 5,
    moves.all_gather_coalesced: 3,
    moves.gather: 4,
    moves.scatter: 4,
    moves.all_to_all: 5,
    moves.all_to_all_single: 5,
    moves.barrier: 3,
    messages.round_of_messages: 8,
    messages.from_any_source: 4,
    messages.blocking_ring: 3,
    objects.all_gather_object: 2,
    objects.broadcast_object_list: 2,
    objects.gather_object: 2,
    objects.scatter_object_list: 2,
    objects.send_object_list: 2,
    buckets.shared_bucket: 2,
    buckets.kept_bucket: 4,
    buckets.ddp: 1,
    callbacks.chained: 3,
    callbacks.many: 2,
}
OF_ALL_RANKS: dict[Operation, int] = {
    core_share.core_all_reduce: 8,
    core_share.core_fusion: 3,
    core_share.core_sub_group: 2,
    core_share.core_exchange: 2,
    mishaps.mishap: 2,
}


@dataclass(frozen=True)
class Step:
    """The step at one index.

    Attributes:
        kind: `make` or `destroy` a group, set a `timeout`, or `run` an operation.
        group: The live group, by its position in the list.
        members: The members of a group to create.
        operation: The operation to run.
        asynchronous: Whether its handle is waited for later.
        in_flight: How many operations may be in flight after this step.
        dropped: Whether no rank ever waits for the operation.
        random: The operation's random generator, the same on all ranks.
    """

    kind: str
    group: int
    members: tuple[int, ...]
    operation: Operation
    asynchronous: bool
    in_flight: int
    dropped: bool
    random: random.Random


def step(seed: int, index: int, world: int, groups: int) -> Step:
    """Return the step of an index, with `groups` live groups; the first has all ranks."""
    draw = random.Random(f"{seed} {index}")
    group = 0 if draw.random() < 0.5 else draw.randrange(groups)
    members = tuple(sorted(draw.sample(range(world), draw.randrange(1, world + 1))))
    way = draw.random()
    kind = "run"
    if way < 0.03 and groups < MOST_GROUPS:
        kind = "make"
    elif way < 0.05 and group:
        kind = "destroy"
    elif way < 0.06:
        kind = "timeout"
    table = WEIGHTS
    if kind == "run" and draw.random() < 0.1:
        table, group = OF_ALL_RANKS, 0
    operation = chosen(draw, table)
    asynchronous = draw.random() < 0.5
    in_flight = draw.randrange(MOST_IN_FLIGHT + 1)
    dropped = asynchronous and draw.random() < 0.1
    return Step(kind, group, members, operation, asynchronous, in_flight, dropped, draw)


def chosen(draw: random.Random, table: dict[Operation, int]) -> Operation:
    names: Sequence[Operation] = list(table)
    return draw.choices(names, list(table.values()))[0]
