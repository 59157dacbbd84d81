"""all_reduce, reduce and reduce_scatter in all forms."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from stress.soak.turn import Started, Turn
from tests.core.values import DTYPES, FACTORS, Array


def drawn(turn: Turn) -> tuple[str, str]:
    """Draw a dtype and a reduction."""
    dtype = turn.dtype(DTYPES)
    also = ("avg", "premul_sum") if turn.world <= len(FACTORS) else ("avg",)
    return dtype, turn.reduction(dtype, also)


def c10d_op(op: str, rank: int) -> Any:
    if op == "premul_sum":
        return dist.ReduceOp.PREMUL_SUM(FACTORS[rank])
    return getattr(dist.ReduceOp, op.upper())


def all_reduce(turn: Turn) -> Started:
    dtype, op = drawn(turn)
    count = turn.count(turn.empty(dtype).itemsize)
    inputs = [turn.values(dtype, count, r) for r in turn.everyone]
    tensor = turn.tensor(dtype, inputs[turn.rank], turn.layout())
    work = dist.all_reduce(tensor, c10d_op(op, turn.rank), turn.group, turn.asynchronous)
    return Started(work, lambda: turn.equal(tensor, turn.reduced(dtype, op, inputs), op))


def all_reduce_coalesced(turn: Turn) -> Started:
    dtype, op = drawn(turn)
    size, pieces = turn.empty(dtype).itemsize, turn.plan.randrange(1, 5)
    counts = [turn.count(size, pieces) for _ in range(pieces)]
    inputs = [[turn.values(dtype, n, r, i) for r in turn.everyone] for i, n in enumerate(counts)]
    tensors = [turn.tensor(dtype, of[turn.rank], turn.layout()) for of in inputs]
    code = c10d_op(op, turn.rank)
    work = dist.all_reduce_coalesced(tensors, code, turn.group, turn.asynchronous)

    def check() -> None:
        for tensor, of in zip(tensors, inputs, strict=True):
            turn.equal(tensor, turn.reduced(dtype, op, of), op)

    return Started(work, check)


def reduce(turn: Turn) -> Started:
    dtype, op = drawn(turn)
    count, root = turn.count(turn.empty(dtype).itemsize), turn.plan.randrange(turn.world)
    inputs = [turn.values(dtype, count, r) for r in turn.everyone]
    tensor = turn.tensor(dtype, inputs[turn.rank], turn.layout())
    code = c10d_op(op, turn.rank)
    work = dist.reduce(
        tensor, op=code, group=turn.group, async_op=turn.asynchronous, group_dst=root
    )

    def check() -> None:
        mine = turn.reduced(dtype, op, inputs) if turn.rank == root else inputs[turn.rank]
        turn.equal(tensor, mine, op)

    return Started(work, check)


def of_part(inputs: list[list[Array]], part: int) -> list[Array]:
    return [parts[part] for parts in inputs]


def reduce_scatter(turn: Turn) -> Started:
    """Reduce and scatter lists, whose parts may differ in size."""
    dtype, op = drawn(turn)
    size, uneven = turn.empty(dtype).itemsize, turn.plan.random() < 0.5
    first = turn.count(size, turn.world)
    counts = [turn.count(size, turn.world) if uneven and r else first for r in turn.everyone]
    inputs = [[turn.values(dtype, n, r, n) for n in counts] for r in turn.everyone]
    sources = [turn.tensor(dtype, part, turn.layout()) for part in inputs[turn.rank]]
    output = turn.blank(dtype, counts[turn.rank], turn.layout())
    code = c10d_op(op, turn.rank)
    work = dist.reduce_scatter(output, sources, code, turn.group, turn.asynchronous)

    def check() -> None:
        turn.equal(output, turn.reduced(dtype, op, of_part(inputs, turn.rank)), op)
        for source, part in zip(sources, inputs[turn.rank], strict=True):
            turn.equal(source, part, "an input")

    return Started(work, check)


def reduce_scatter_tensor(turn: Turn) -> Started:
    dtype, op = drawn(turn)
    world, count = turn.world, turn.count(turn.empty(dtype).itemsize, turn.world)
    inputs = [turn.values(dtype, world * count, r) for r in turn.everyone]
    source = turn.tensor(dtype, inputs[turn.rank], turn.layout())
    output = turn.blank(dtype, count, turn.layout())
    code = c10d_op(op, turn.rank)
    work = dist.reduce_scatter_tensor(output, source, code, turn.group, turn.asynchronous)

    def check() -> None:
        begin = turn.rank * count
        parts = [whole[begin : begin + count] for whole in inputs]
        turn.equal(output, turn.reduced(dtype, op, parts), op)

    return Started(work, check)
