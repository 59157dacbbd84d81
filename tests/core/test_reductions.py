"""Every reduction of every element type, bit by bit, on every path and number of ranks.

The expectation is exact, so that agreement with it is also agreement of the ranks with each other,
of the paths with each other and of one run with the next. Only NaNs, whose bits NumPy need not
share, are compared between ranks and paths directly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import Buffer, DType, Group, ReduceOp
from tests.core.kept_group import kept_group, registered
from tests.core.values import (
    DTYPES,
    FACTORS,
    FLOATS,
    REDUCTIONS,
    Array,
    as_input,
    reduced,
    same_bits,
    storage,
    values,
)
from tests.ranks import Pool

WORLDS = (1, 2, 3, 4)
SMALL = (0, 1, 7, 1000)
STAGED = 40_961  # more than travels inline, and no multiple of anything
LARGE_NBYTES = 2**20  # and three elements: more than the staging memory holds at once

# So many: all types with one operator, all operators with one type of each kind.
LARGE_OPS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(DTYPES, ("sum",)),
    **{dtype: REDUCTIONS[dtype] for dtype in ("float32", "bfloat16", "int32")},
}


def operator(op: str, rank: int) -> ReduceOp | str:
    return ReduceOp.premul_sum(FACTORS[rank]) if op == "premul_sum" else op


def run_all_reduce(group: Group, mine: Array, place: Array, dtype: str, op: Any) -> Array:
    place[:] = mine
    group.all_reduce(as_input(place, dtype), op)
    return place


def run_reduce(group: Group, mine: Array, place: Array, dtype: str, op: Any) -> Array:
    """The last rank is the root; the others' buffers must not change."""
    place[:] = mine
    group.reduce(as_input(place, dtype), group.world_size - 1, op)
    return place


def run_reduce_scatter(group: Group, mine: Array, place: Array, dtype: str, op: Any) -> Array:
    """Each rank's part has the length of `place`; the first of them is `mine`."""
    whole = np.concatenate([np.roll(mine, shift) for shift in range(group.world_size)])
    group.reduce_scatter(as_input(place, dtype), as_input(whole, dtype), op)
    return place


def expect_everywhere(total: Array, mine: Array, rank: int, world: int) -> Array:
    return total


def expect_at_root(total: Array, mine: Array, rank: int, world: int) -> Array:
    return total if rank == world - 1 else mine


def expect_rolled(total: Array, mine: Array, rank: int, world: int) -> Array:
    return np.roll(total, rank)


COLLECTIVES = {
    "all_reduce": (run_all_reduce, expect_everywhere),
    "reduce": (run_reduce, expect_at_root),
    "reduce_scatter": (run_reduce_scatter, expect_rolled),
}


def places(count: int, dtype: str) -> Iterator[tuple[bool, Array]]:
    """Where a buffer can lie: (registered?, memory)."""
    yield False, np.zeros(count, storage(dtype))
    yield True, registered(count, dtype)


def check(rank: int, world: int, dtype: str, counts: tuple[int, ...], ops: Any) -> Any:
    """Cases whose result is not NumPy's, or that took another path than announced; paths seen."""
    group = kept_group()
    wrong, seen = [], set()
    for count in counts:
        inputs = [values(dtype, count, r) for r in range(world)]
        for op in ops:
            total = reduced(inputs, dtype, op)
            for name, (run, expect) in COLLECTIVES.items():
                expected = expect(total, inputs[rank], rank, world)
                for is_registered, place in places(count, dtype):
                    got = run(group, inputs[rank], place, dtype, operator(op, rank))
                    seen.add(group.last_path)
                    shown = total.nbytes * (world if name == "reduce_scatter" else 1)
                    path = group.explain(name, shown, registered=is_registered)
                    if not same_bits(got, expected):
                        wrong.append(f"{name} {op} {dtype}[{count}] {group.last_path}: differs")
                    if not path.startswith(group.last_path + ":"):
                        wrong.append(f"{name} {dtype}[{count}]: {group.last_path}, not {path}")
    return wrong, seen


def assert_right(results: list[Any], *paths: str) -> None:
    assert [wrong for wrong, _ in results] == [[] for _ in results]
    assert [seen for _, seen in results] == [set(paths) for _ in results]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_small(rank_pool: Pool, world: int, dtype: str) -> None:
    results = rank_pool(world).run(check, dtype, SMALL, REDUCTIONS[dtype])
    assert {"inline"} <= results[0][1] <= {"inline", "staged"}
    assert [wrong for wrong, _ in results] == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_staged_and_zero_copy(rank_pool: Pool, world: int, dtype: str) -> None:
    assert_right(
        rank_pool(world).run(check, dtype, (STAGED,), REDUCTIONS[dtype]), "staged", "zero-copy"
    )


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_large(rank_pool: Pool, world: int, dtype: str) -> None:
    count = LARGE_NBYTES // storage(dtype).itemsize + 3
    assert_right(
        rank_pool(world).run(check, dtype, (count,), LARGE_OPS[dtype]), "staged", "zero-copy"
    )


# ---- special values -----------------------------------------------------------------------------

SPECIAL = {
    "float16": [0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0xFC00, 0x7E01, 0x7D55],
    "bfloat16": [0x0000, 0x8000, 0x0001, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0xFF80, 0x7FC1, 0x7FA5],
    "float32": [0, 1 << 31, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001],
    "float64": [0, 1 << 63, 1, 2**52 - 1, 0x7FEF << 48, 0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48],
}
"""Zeros, subnormal numbers, the smallest and largest normal ones, infinities, NaNs: as bits."""


def special(dtype: str, rank: int, count: int) -> Array:
    """Every pair of special values meets somewhere."""
    size = storage(dtype).itemsize
    bits = np.array(SPECIAL[dtype], np.dtype(f"u{size}"))
    index = np.arange(count) // len(bits) ** rank % len(bits)
    return bits[index].view(storage(dtype))


def is_nan(array: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return (array & 0x7FFF) > 0x7F80
    return np.isnan(array)


def check_special(rank: int, world: int, dtype: str) -> list[tuple[str, str]]:
    """(case, digest of the result) of all operators and paths, once compared with NumPy."""
    group = kept_group()
    digests = []
    for count in (1000, STAGED):
        inputs = [special(dtype, r, count) for r in range(world)]
        for op in REDUCTIONS[dtype]:
            expected = reduced(inputs, dtype, op)
            nan = is_nan(expected, dtype)
            for is_registered, place in places(count, dtype):
                place[:] = inputs[rank]
                group.all_reduce(as_input(place, dtype), operator(op, rank))
                case = f"{op}[{count}] {'registered' if is_registered else 'private'}"
                assert np.array_equal(is_nan(place, dtype), nan), f"{case}: NaNs"
                if op in ("min", "max"):  # which zero is the smaller one is nobody's business
                    assert np.array_equal(place[~nan], expected[~nan]) or dtype == "bfloat16", case
                else:
                    assert same_bits(place[~nan], expected[~nan]), case
                digests.append((case, hashlib.sha256(place.tobytes()).hexdigest()))
    return digests


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_infinity_and_subnormal(rank_pool: Pool, world: int, dtype: str) -> None:
    first, *others = rank_pool(world).run(check_special, dtype)
    assert all(other == first for other in others), "ranks differ"
    again = rank_pool(world).run(check_special, dtype)
    assert again[0] == first, "runs differ"


def check_true(rank: int, world: int) -> dict[str, tuple[int, ...]]:
    """Any nonzero byte is true, and what is stored is 0 or 1."""
    group = kept_group()
    found = {}
    for op in REDUCTIONS["bool"]:
        data = np.array([0, 2 * rank, 0xFF, 1 << rank], np.uint8)
        group.all_reduce(Buffer(data.ctypes.data, data.size, DType.bool, data), op)
        found[op] = tuple(data.tolist())
    return found


def test_any_nonzero_byte_is_true(rank_pool: Pool) -> None:
    expected = {
        **dict.fromkeys(("sum", "max", "bor"), (0, 1, 1, 1)),
        **dict.fromkeys(("product", "min", "band"), (0, 0, 1, 1)),
        "bxor": (0, 1, 0, 0),
    }
    assert rank_pool(2).run(check_true) == [expected] * 2


# ---- what has no meaning ------------------------------------------------------------------------

SENSELESS = [
    (dtype, op)
    for dtype in DTYPES
    for op in sorted({name for names in REDUCTIONS.values() for name in names})
    if op not in REDUCTIONS[dtype]
]


def refuse_all(rank: int, world: int) -> list[str]:
    """Cases that were not refused with an alternative; the group works on after each."""
    group = kept_group()
    wrong = []
    for dtype, op in SENSELESS:
        for name in COLLECTIVES:
            data = values(dtype, 4 * world, rank)
            before = data.copy()
            out = np.zeros(4, storage(dtype))
            chosen = ReduceOp.premul_sum(2) if op == "premul_sum" else op
            try:
                if name == "all_reduce":
                    group.all_reduce(as_input(data, dtype), chosen)
                elif name == "reduce":
                    group.reduce(as_input(data, dtype), 0, chosen)
                else:
                    group.reduce_scatter(as_input(out, dtype), as_input(data, dtype), chosen)
                wrong.append(f"{name} {op} {dtype}: accepted")
            except ValueError as error:
                text = str(error)
                named = op in text and dtype in text and "Hint:" in text
                if not named or not all(other in text for other in REDUCTIONS[dtype]):
                    wrong.append(f"{name} {op} {dtype}: {text}")
            if not same_bits(data, before):
                wrong.append(f"{name} {op} {dtype}: touched")
    group.barrier()
    return wrong


def test_senseless_pairs_are_refused(rank_pool: Pool) -> None:
    assert rank_pool(2).run(refuse_all) == [[], []]


def refuse_unknown(rank: int, world: int) -> str:
    try:
        kept_group().all_reduce(np.zeros(3), "median")
    except ValueError as error:
        return str(error)
    return "accepted"


def test_unknown_operator_lists_the_known(rank_pool: Pool) -> None:
    text = (
        "unknown reduction 'median'. Hint: use one of sum, avg, product, min, max, band, bor, bxor."
    )
    assert rank_pool(2).run(refuse_unknown) == [text, text]
