"""The same ranks with the core's own Group: NumPy arrays, fusion buffers, allocated memory."""

from __future__ import annotations

import numpy as np

from sdp_plugins.core import FusionBuffer, Group, ReduceOp
from stress.soak.turn import Mismatch, Started, Turn
from tests.core.values import DTYPES, FACTORS, REDUCTIONS, as_input, reduced, same_bits, storage


def expect(good: bool, what: str) -> None:
    if not good:
        raise Mismatch(f"{what} differs")


def group_of(turn: Turn) -> Group:
    """Return the core group of all ranks."""
    group: Group = turn.live.kept["core"]
    return group


def core_all_reduce(turn: Turn) -> Started:
    """Run all reductions, in memory of the group or of the caller."""
    dtype = turn.dtype(DTYPES)
    op = turn.plan.choice(REDUCTIONS[dtype])
    if op == "premul_sum" and turn.world > len(FACTORS):
        op = "sum"
    count, group = turn.count(storage(dtype).itemsize), group_of(turn)
    inputs = [turn.values(dtype, count, r) for r in turn.everyone]
    array = np.array(inputs[turn.rank])
    if turn.plan.random() < 0.3 and count:
        memory = group.allocate(array.nbytes)
        array = np.frombuffer(memory, storage(dtype))
        array[:] = inputs[turn.rank]
    text = f"premul_sum({FACTORS[turn.rank]})" if op == "premul_sum" else op
    group.all_reduce(as_input(array, dtype), native_op(op, turn.rank))
    expect(same_bits(array, reduced(inputs, dtype, op)), f"core {text} of {dtype}[{count}]")
    return Started(None, lambda: None)


def native_op(op: str, rank: int) -> ReduceOp | str:
    return ReduceOp.premul_sum(FACTORS[rank]) if op == "premul_sum" else op


def core_fusion(turn: Turn) -> Started:
    """Use a fusion buffer over some steps; its tensors become ready in any order."""
    group = group_of(turn)
    counts = [turn.count(4, 4) for _ in range(turn.plan.randrange(1, 12))]
    threshold = 128 * turn.plan.randrange(1, 20000)
    buffer = FusionBuffer(
        group, [(n, "float32") for n in counts], op="avg", threshold_bytes=threshold
    )
    for step in range(turn.plan.randrange(1, 4)):
        inputs = [
            [turn.values("float32", n, r, step, i) for i, n in enumerate(counts)]
            for r in turn.everyone
        ]
        arrays = [np.array(x) for x in inputs[turn.rank]]
        for i in turn.own.sample(range(len(arrays)), len(arrays)):
            buffer.ready(i, arrays[i])
        buffer.finish()
        for i, array in enumerate(arrays):
            expected = reduced([of[i] for of in inputs], "float32", "avg")
            expect(same_bits(array, expected), f"tensor {i} of a fusion buffer")
    return Started(None, lambda: None)


def core_sub_group(turn: Turn) -> Started:
    """Use a group of some ranks in an order of its own."""
    group = group_of(turn)
    members = turn.plan.sample(turn.everyone, turn.plan.randrange(1, turn.world + 1))
    count = turn.count(8)
    sub = group.new_group(members)
    if sub is None:
        return Started(None, lambda: None)
    with sub:
        inputs = [turn.values("float64", count, r) for r in members]
        array = np.array(inputs[sub.rank])
        work = sub.all_reduce(array, async_op=True)
        assert work is not None
        work.wait()
        expect(same_bits(array, reduced(inputs, "float64", "sum")), "a sub-group's sum")
    return Started(None, lambda: None)


def core_exchange(turn: Turn) -> Started:
    """Exchange blobs of any lengths."""
    blobs = [turn.values("uint8", turn.count(1, 2) * (r % 3), r).tobytes() for r in turn.everyone]
    expect(group_of(turn).exchange(blobs[turn.rank]) == blobs, "an exchange")
    return Started(None, lambda: None)
