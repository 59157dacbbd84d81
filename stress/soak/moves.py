"""Collectives that move data: broadcast, gathers, scatter, all_to_all, barrier."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import torch.distributed as dist

from stress.soak.data import bits
from stress.soak.turn import Started, Turn


def drawn(turn: Turn, parts: int = 1) -> tuple[str, int]:
    """Draw a dtype, and the elements of one of `parts` parts."""
    dtype = turn.dtype()
    return dtype, turn.count(bits(dtype).itemsize, parts)


def broadcast(turn: Turn) -> Started:
    dtype, count = drawn(turn)
    root, layout = turn.plan.randrange(turn.world), turn.layout()
    data = turn.values(dtype, count, root)
    tensor = turn.blank(dtype, count, layout)
    if turn.rank == root:
        tensor = turn.tensor(dtype, data, layout)
    work = dist.broadcast(tensor, group=turn.group, async_op=turn.asynchronous, group_src=root)
    return Started(work, lambda: turn.equal(tensor, data))


def all_gather(turn: Turn) -> Started:
    """Gather into lists; sizes may differ between ranks."""
    dtype, count = drawn(turn, turn.world)
    uneven = turn.plan.random() < 0.5
    counts = [turn.plan.randrange(count + 1) if uneven else count for _ in turn.everyone]
    inputs = [turn.values(dtype, n, r) for r, n in enumerate(counts)]
    outputs = [turn.blank(dtype, n, turn.layout()) for n in counts]
    source = turn.tensor(dtype, inputs[turn.rank], turn.layout())
    work = dist.all_gather(outputs, source, turn.group, turn.asynchronous)

    def check() -> None:
        for output, data in zip(outputs, inputs, strict=True):
            turn.equal(output, data)

    return Started(work, check)


def all_gather_into_tensor(turn: Turn) -> Started:
    dtype, count = drawn(turn, turn.world)
    inputs = [turn.values(dtype, count, r) for r in turn.everyone]
    output = turn.blank(dtype, turn.world * count, turn.layout())
    source = turn.tensor(dtype, inputs[turn.rank], turn.layout())
    work = dist.all_gather_into_tensor(output, source, turn.group, turn.asynchronous)
    return Started(work, lambda: turn.equal(output, np.concatenate(inputs)))


def all_gather_coalesced(turn: Turn) -> Started:
    dtype, pieces = turn.dtype(), turn.plan.randrange(1, 4)
    size = bits(dtype).itemsize
    counts = [turn.count(size, turn.world * pieces) for _ in range(pieces)]
    inputs = [[turn.values(dtype, n, r, n) for n in counts] for r in turn.everyone]
    layouts = [turn.layout() for _ in counts]  # inputs and outputs must have equal shapes
    lists = [list(map(turn.blank, [dtype] * pieces, counts, layouts)) for _ in turn.everyone]
    sources = list(map(turn.tensor, [dtype] * pieces, inputs[turn.rank], layouts))
    work = dist.all_gather_coalesced(lists, sources, turn.group, turn.asynchronous)

    def check() -> None:
        for outputs, of_rank in zip(lists, inputs, strict=True):
            for output, data in zip(outputs, of_rank, strict=True):
                turn.equal(output, data)

    return Started(work, check)


def gather(turn: Turn) -> Started:
    dtype, count = drawn(turn, turn.world)
    root = turn.plan.randrange(turn.world)
    inputs = [turn.values(dtype, count, r) for r in turn.everyone]
    outputs = [turn.blank(dtype, count, turn.layout()) for _ in turn.everyone]
    source = turn.tensor(dtype, inputs[turn.rank], turn.layout())
    work = dist.gather(
        source,
        outputs if turn.rank == root else None,
        group=turn.group,
        async_op=turn.asynchronous,
        group_dst=root,
    )

    def check() -> None:
        for output, data in zip(outputs, inputs, strict=True):
            if turn.rank == root:
                turn.equal(output, data)

    return Started(work, check)


def scatter(turn: Turn) -> Started:
    dtype, count = drawn(turn, turn.world)
    root = turn.plan.randrange(turn.world)
    inputs = [turn.values(dtype, count, r) for r in turn.everyone]
    sources = [turn.tensor(dtype, data, turn.layout()) for data in inputs]
    output = turn.blank(dtype, count, turn.layout())
    work = dist.scatter(
        output,
        sources if turn.rank == root else None,
        group=turn.group,
        async_op=turn.asynchronous,
        group_src=root,
    )
    return Started(work, lambda: turn.equal(output, inputs[turn.rank]))


def split_table(turn: Turn, most: int) -> list[list[int]]:
    """Draw the elements that each rank sends to each rank, sometimes none."""
    empty = turn.plan.random() * 0.5
    return [
        [0 if turn.plan.random() < empty else turn.plan.randrange(most + 1) for _ in turn.everyone]
        for _ in turn.everyone
    ]


def all_to_all(turn: Turn) -> Started:
    """Exchange lists of any sizes."""
    dtype, most = drawn(turn, turn.world)
    table = split_table(turn, most)
    sent = [turn.values(dtype, n, turn.rank, to) for to, n in enumerate(table[turn.rank])]
    sources = [turn.tensor(dtype, data, turn.layout()) for data in sent]
    counts = [row[turn.rank] for row in table]
    outputs = [turn.blank(dtype, n, turn.layout()) for n in counts]
    work = dist.all_to_all(outputs, sources, turn.group, turn.asynchronous)

    def check() -> None:
        for sender, (output, n) in enumerate(zip(outputs, counts, strict=True)):
            turn.equal(output, turn.values(dtype, n, sender, turn.rank))

    return Started(work, check)


def all_to_all_single(turn: Turn) -> Started:
    """Exchange equal parts, or rows of three elements by splits."""
    dtype, most = drawn(turn, turn.world)
    even = turn.plan.random() < 0.4
    table = [[most] * turn.world] * turn.world if even else split_table(turn, most // 3)
    row = 1 if even else 3
    sent, received = table[turn.rank], [of[turn.rank] for of in table]
    data = [turn.values(dtype, row * n, turn.rank, to) for to, n in enumerate(sent)]
    source = turn.tensor(dtype, np.concatenate(data))
    output = turn.blank(dtype, row * sum(received))
    if not even:
        source, output = source.view(-1, row), output.view(-1, row)
    splits = ([], []) if even else (received, sent)
    work = dist.all_to_all_single(output, source, *splits, turn.group, turn.asynchronous)

    def check() -> None:
        parts = [turn.values(dtype, row * n, r, turn.rank) for r, n in enumerate(received)]
        turn.equal(output, np.concatenate(parts))

    return Started(work, check)


def barrier(turn: Turn) -> Started:
    limit = timedelta(seconds=60) if turn.plan.random() < 0.5 else None
    work = dist.barrier(turn.group, turn.asynchronous, timeout=limit)
    return Started(work, lambda: None)
