"""Reductions whose values are rounded on their way between nodes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sdp_plugins.core import _native
from sdp_plugins.core.internode.plan import split
from sdp_plugins.core.internode.residuals import Residuals
from sdp_plugins.core.wire_dtype import WireDType
from tests.core.values import Array, reduced, same_bits, values
from tests.internode.spanning import meet
from tests.ranks import Pool

BLOCK_FORMATS = ("int8", "fp8", "int4")
WIRES = (
    *("bfloat16", "float16", *BLOCK_FORMATS),
    *("int8 stochastic=3", "fp8 stochastic feedback", "int4 feedback"),
)
COUNTS = (1000, 40_961, 2**20 + 3)
"""As it is, in one segment, in several."""
HALF_UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
BLOCK = 256


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("stores"))


# ---- how far a value may be off ------------------------------------------------------------------


def rounding(wire: str, sizes: Array, largest: Array) -> Array:
    """The most by which values of these sizes change, in blocks with these largest values."""
    name, *options = wire.split()
    if name in HALF_UNITS:
        return HALF_UNITS[name] * sizes + 2.0**-25
    nearest = largest / {"int8": 252, "fp8": 425_984, "int4": 12}[name] * np.ones_like(sizes)
    if name == "fp8":
        nearest = np.maximum(sizes / 16, nearest)
    # Stochastic rounding may take the farther neighbour, and a residual is added to the values.
    return nearest * (1 + 2.0**-12) * (3 if options else 1)


def allowed(wire: str, inputs: list[Array]) -> Array:
    """The bound of docs/slow-networks.md: partial sums are rounded once, and the result again."""
    sizes = np.sum([np.abs(x) for x in inputs], axis=0)
    largest = np.array([np.abs(x).max() for x in inputs]).sum()  # of any block
    sums = rounding(wire, sizes, largest)
    return sums + rounding(wire, np.abs(np.sum(inputs, axis=0)) + sums, largest * 1.2)


def packed(values: Array, wire: str, seed: int | None = None) -> Array:
    """What arrives of the values of one part."""
    form = _native.BlockFormat[wire]
    blocks = np.zeros(_native.blocks_nbytes(form, len(values)), np.uint8)
    found, source = np.empty_like(values), np.ascontiguousarray(values)
    _native.pack_blocks(form, blocks.ctypes.data, source.ctypes.data, len(values), 0, seed)
    _native.unpack_blocks(form, found.ctypes.data, blocks.ctypes.data, len(values))
    return found


def blockwise(values: Array) -> Array:
    """The largest size in the block of each value."""
    starts = np.arange(0, len(values), BLOCK)
    return np.repeat(np.maximum.reduceat(np.abs(values), starts), BLOCK)[: len(values)]


FLOATS = arrays(np.float32, st.integers(1, 700), elements=st.floats(-(2.0**90), 2.0**90, width=32))


@given(FLOATS, st.sampled_from(BLOCK_FORMATS), st.none() | st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_rounding_changes_no_value_by_more_than_the_bound(
    data: Array, wire: str, seed: int | None
) -> None:
    largest = np.maximum(blockwise(data), 2.0**-100)
    bound = rounding(wire if seed is None else f"{wire} stochastic", np.abs(data), largest)
    bound[largest <= 2.0**-100] = 2.0**-100
    assert (np.abs(packed(data, wire, seed).astype(float) - data) <= bound).all()


@given(FLOATS, st.integers(2, 5), st.integers(0, 4), st.sampled_from(BLOCK_FORMATS))
@settings(deadline=None)
def test_a_sum_is_off_by_no_more_than_the_bound(
    data: Array, nodes: int, server: int, wire: str
) -> None:
    inputs = [np.roll(data, node * 7) * np.float32(1 - node / 3) for node in range(nodes)]
    sums = [x if node == server % nodes else packed(x, wire) for node, x in enumerate(inputs)]
    result = packed(np.sum(sums, axis=0, dtype=np.float32), wire)
    exact = np.sum(inputs, axis=0, dtype=np.float64)
    tiny = (nodes + 1) * 2.0**-100 + 1e-6 * np.sum(np.abs(inputs), axis=0)
    assert (np.abs(result - exact) <= allowed(wire, inputs) + tiny).all()


# ---- over a network ------------------------------------------------------------------------------


def compress(rank: int, world: int, layout: str, root: str, wire: str) -> list[str]:
    wrong = []
    with meet(layout, root, f"{layout}-{wire}", wire_dtype=wire) as group:
        for count, op in product(COUNTS, ("sum", "avg")):
            inputs = [values("float32", count, r) for r in range(world)]
            data = inputs[rank].copy()
            group.all_reduce(data, op)
            exact = reduced(inputs, "float32", op)
            bound = allowed(wire, inputs) / (world if op == "avg" else 1)
            if (np.abs(data - exact) > bound).any():
                wrong.append(f"{count}: off by {np.abs((data - exact) / bound).max():.2f} bounds")
            if same_bits(data, exact) != (count == COUNTS[0]):
                wrong.append(f"{count}: rounded, or not")
            same = np.zeros((world, count), np.float32)
            group.all_gather(same, data)
            if not all(same_bits(row, data) for row in same):
                wrong.append(f"{count}: ranks differ")
            part = np.zeros(count, np.float32)
            to_all = [values("float32", count, rank, 10 + peer) for peer in range(world)]
            group.reduce_scatter(part, np.concatenate(to_all), op)
            to_me = [values("float32", count, r, 10 + rank) for r in range(world)]
            exact = reduced(to_me, "float32", op)
            if (np.abs(part - exact) > allowed(wire, to_me)).any():
                wrong.append(f"{count}: reduce_scatter is off")
    return wrong


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("layout", ["2x2", "4x1"])
def test_sums(rank_pool: Pool, root: str, wire: str, layout: str) -> None:
    assert rank_pool(4).run(compress, layout, root, wire) == [[]] * 4


def other_reductions(rank: int, world: int, root: str) -> list[str]:
    """What no wire dtype changes: float64, integers; what 8 bits do not: maxima and products."""
    wrong = []
    with meet("4x1", root, "others", wire_dtype="int8") as group:
        for dtype, op in [("float64", "sum"), ("int32", "sum"), ("float32", "max")]:
            inputs = [values(dtype, 40_000, r) for r in range(world)]
            data = inputs[rank].copy()
            group.all_reduce(data, op)
            if not same_bits(data, reduced(inputs, dtype, op)):
                wrong.append(f"{dtype} {op}")
        data = values("float32", 40_000, rank)
        group.reduce(data, 1)
        inputs = [values("float32", 40_000, r) for r in range(world)]
        exact = reduced(inputs, "float32", "sum") if rank == 1 else inputs[rank]
        off = np.abs(data - exact)
        if (off > allowed("int8", inputs)).any() or off.any() != (rank == 1):
            wrong.append("reduce")
    return wrong


def test_what_is_not_rounded(rank_pool: Pool, root: str) -> None:
    assert rank_pool(4).run(other_reductions, root) == [[]] * 4


def sum_by_hand(inputs: list[Array], wire: str) -> Array:
    """What the ranks of 4 nodes get: each serves a part, in which its own values are exact."""
    result = []
    for server in range(len(inputs)):
        begin, count = split(len(inputs[0]), len(inputs), server)
        parts = [x[begin : begin + count] for x in inputs]
        sums = [x if node == server else packed(x, wire) for node, x in enumerate(parts)]
        total = (sums[0] + sums[1]) + (sums[2] + sums[3])
        result.append(packed(total, wire))
    return np.concatenate(result)


def special_values(rank: int, world: int, root: str, wire: str) -> list[str]:
    wrong = []
    with meet("4x1", root, f"special-{wire}", wire_dtype=wire) as group:
        for count in (4097, 40_961):
            inputs = [values("float32", count, r) for r in range(world)]
            for place, special in ((3, np.nan), (1030, np.inf), (2050, -np.inf)):
                inputs[place % world][place] = special
            inputs[0][5], inputs[1][5] = np.inf, -np.inf
            data = inputs[rank].copy()
            group.all_reduce(data)
            if not same_bits(data, sum_by_hand(inputs, wire)):
                wrong.append(f"{count}: another sum")
            with np.errstate(invalid="ignore"):
                exact = np.sum(inputs, axis=0)
            if not np.array_equal(np.isnan(data), np.isnan(exact)):
                wrong.append(f"{count}: NaN at {np.flatnonzero(np.isnan(data))}")
            if not np.array_equal(data[np.isinf(exact)], exact[np.isinf(exact)]):
                wrong.append(f"{count}: infinities")
    return wrong


@pytest.mark.parametrize("wire", BLOCK_FORMATS)
def test_the_bits_of_a_sum(rank_pool: Pool, root: str, wire: str) -> None:
    assert rank_pool(4).run(special_values, root, wire) == [[]] * 4


def repeat(rank: int, world: int, root: str, name: str, wire: str, steps: int) -> Array:
    """The mean of the sums of the same values, in the same buffer."""
    with meet("4x1", root, name, wire_dtype=wire) as group:
        data, total = np.empty(5000, np.float32), np.zeros(5000)
        for _ in range(steps):
            data[:] = values("float32", 5000, rank)
            group.all_reduce(data)
            total += data
    return total / steps


@pytest.mark.parametrize(
    "wire", ["int8 feedback", "int8 stochastic", "int8 stochastic=5 feedback", "int4 feedback"]
)
def test_the_mean_of_many_sums_is_exact(rank_pool: Pool, root: str, wire: str) -> None:
    """With feedback the error is left out once, not in each step; with luck it cancels out."""
    exact = reduced([values("float32", 5000, r) for r in range(4)], "float32", "sum")

    def error(compared: str, steps: int) -> float:
        name = f"{wire}, {compared}"  # of a group that no other test makes
        found = rank_pool(4).run(repeat, root, name, compared, steps)
        assert all(same_bits(x, found[0]) for x in found)
        return float(np.abs(found[0] - exact).mean())

    assert error(wire, 100) < 0.3 * error(wire.split()[0], 1)


def test_random_numbers_are_the_same_in_every_run(rank_pool: Pool, root: str) -> None:
    def run(name: str, wire: str) -> Array:
        return rank_pool(4).run(repeat, root, name, wire, 2)[0]

    first = run("a", "int8 stochastic=7")
    assert same_bits(first, run("b", "int8 stochastic=7"))
    assert not same_bits(first, run("c", "int8 stochastic=8"))


# ---- the words of a user -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("none", None),
        ("FLOAT32", None),
        ("bf16", WireDType("bfloat16")),
        ("float16", WireDType("float16")),
        ("int8", WireDType("int8")),
        ("fp8 feedback", WireDType("fp8", None, True)),
        ("int8,stochastic", WireDType("int8", 0)),
        ("int8 stochastic=7 feedback", WireDType("int8", 7, True)),
    ],
)
def test_words(text: str, found: WireDType | None) -> None:
    assert WireDType.parse(text) == found
    if found is not None:
        assert WireDType.parse(str(found)) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "int3",
        "bf16 feedback",
        "none feedback",
        "int8 stochastic=x",
        "int8 stochastic=-1",
        "int8 7",
    ],
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no wire dtype"):
        WireDType.parse(text)


def test_residuals_of_buffers_that_do_not_return_take_no_memory() -> None:
    kept = Residuals()
    assert all(kept.address((key,), 10) == 0 for key in range(70_000))
    first = kept.address((69_999,), 10)
    assert first != 0 and kept.address((69_999,), 10) == first
    assert kept.address((0,), 10) == 0  # forgotten
