"""Ranks that disagree: all are told what each of them called."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import CollectiveMismatchError, Group, ReduceOp, SdpError
from sdp_plugins.core.tensor_lists import broadcast_arrays, gather_uneven
from tests.core.kept_group import kept_group
from tests.ranks import Pool


def f32(count: int) -> np.ndarray[Any, Any]:
    return np.ones(count, np.float32)


Call = Callable[[Group, np.ndarray[Any, Any]], object]
BIG = 2**18

# What all ranks but the last call, what that one calls, and how both are announced.
MISMATCHES: dict[str, tuple[Call, str, Call, str]] = {
    "operation": (
        lambda g, x: g.all_reduce(x),
        "all_reduce #2 float32[BIG] sum",
        lambda g, x: g.broadcast(x, 0),
        "broadcast #2 float32[BIG] root 0",
    ),
    "barrier": (
        lambda g, x: g.all_reduce(x),
        "all_reduce #2 float32[BIG] sum",
        lambda g, x: g.barrier(),
        "barrier #2",
    ),
    "dtype": (
        lambda g, x: g.all_reduce(x),
        "all_reduce #2 float32[BIG] sum",
        lambda g, x: g.all_reduce(x.view(np.int32)),
        "all_reduce #2 int32[BIG] sum",
    ),
    "count": (
        lambda g, x: g.all_reduce(x),
        "all_reduce #2 float32[BIG] sum",
        lambda g, x: g.all_reduce(x[:-1]),
        "all_reduce #2 float32[LESS] sum",
    ),
    "count on two paths": (
        lambda g, x: g.all_reduce(x),
        "all_reduce #2 float32[BIG] sum",
        lambda g, x: g.all_reduce(x[:5]),
        "all_reduce #2 float32[5] sum",
    ),
    "reduction": (
        lambda g, x: g.all_reduce(x),
        "all_reduce #2 float32[BIG] sum",
        lambda g, x: g.all_reduce(x, "max"),
        "all_reduce #2 float32[BIG] max",
    ),
    "premul_sum": (
        lambda g, x: g.all_reduce(x),
        "all_reduce #2 float32[BIG] sum",
        lambda g, x: g.all_reduce(x, ReduceOp.premul_sum(2)),
        "all_reduce #2 float32[BIG] premul_sum",
    ),
    "root": (
        lambda g, x: g.broadcast(x, 0),
        "broadcast #2 float32[BIG] root 0",
        lambda g, x: g.broadcast(x, 1),
        "broadcast #2 float32[BIG] root 1",
    ),
    "count of a broadcast": (
        lambda g, x: g.broadcast(x, 0),
        "broadcast #2 float32[BIG] root 0",
        lambda g, x: g.broadcast(x[:-1], 0),
        "broadcast #2 float32[LESS] root 0",
    ),
    "root of a reduce": (
        lambda g, x: g.reduce(x, 0),
        "reduce #2 float32[BIG] sum root 0",
        lambda g, x: g.reduce(x, 1),
        "reduce #2 float32[BIG] sum root 1",
    ),
    "reduce_scatter": (
        lambda g, x: g.reduce_scatter(x, f32(3 * len(x))),
        "reduce_scatter #2 float32[BIG] sum",
        lambda g, x: g.reduce_scatter(x[:-1], f32(3 * len(x) - 3)),
        "reduce_scatter #2 float32[LESS] sum",
    ),
}
SIZES = {"inline": 1000, "staged": BIG, "zero-copy": BIG}


def disagree(rank: int, world: int, case: str, path: str) -> tuple[BaseException, bool]:
    """The error, and whether the buffer is as it was."""
    usual, _, other, _ = MISMATCHES[case]
    with Group.from_env(timeout_s=30) as group:
        data = f32(SIZES[path])
        if path == "zero-copy":
            data = np.frombuffer(group.allocate(data.nbytes), np.float32)
        data[:] = np.arange(len(data)) + rank
        before = data.copy()
        group.barrier()
        with pytest.raises(CollectiveMismatchError) as caught:
            (other if rank == world - 1 else usual)(group, data)
        unchanged = np.array_equal(data, before)
        with pytest.raises(CollectiveMismatchError) as again:
            group.barrier()
        assert str(again.value) == str(caught.value)
        return caught.value, unchanged


@pytest.mark.parametrize("path", SIZES)
@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch(rank_pool: Pool, case: str, path: str) -> None:
    size = SIZES[path]
    _, usual, _, other = MISMATCHES[case]
    usual, other = (
        text.replace("BIG", str(size)).replace("LESS", str(size - 1)) for text in (usual, other)
    )
    for rank, (error, unchanged) in enumerate(rank_pool(3).run(disagree, case, path)):
        called = other if rank == 2 else usual
        assert str(error) == (
            f"[rank {rank}/3] {called}: ranks disagree: ranks 0, 1: {usual}; rank 2: {other} "
            "(last completed: barrier #1). Hint: all ranks must call the same operations in the "
            "same order, with the same types and sizes (and fusion buffers of the same tensors); "
            "look for a branch that depends on the rank or its data."
        )
        assert isinstance(error, SdpError) and unchanged
        assert (error.ranks, error.op, error.seq) == ((2,), called.split(" ")[0], 2)


def uneven(lengths: list[list[int]]) -> Callable[[Group, Any], object]:
    """Rank r offers lengths[r][r] and expects lengths[r][s] of rank s."""

    def call(group: Group, x: Any) -> object:
        mine = lengths[group.rank]
        group.received = [x(n) for n in mine]  # type: ignore[attr-defined]
        return group.all_gather_uneven(group.received, x(mine[group.rank]))  # type: ignore[attr-defined]

    return call


def gather_to_1(group: Group, x: Any) -> object:
    group.received = [x(5), x(6), x(7)]  # type: ignore[attr-defined]
    outputs = group.received if group.rank == 1 else None  # type: ignore[attr-defined]
    return group.gather(outputs, x(4 + 2 * group.rank), 1)


def scatter_from_0(group: Group, x: Any) -> object:
    group.received = [x(5 + group.rank % 2)]  # type: ignore[attr-defined]
    inputs = [x(5), x(6), x(7)] if group.rank == 0 else None
    return group.scatter(group.received[0], inputs, 0)  # type: ignore[attr-defined]


def all_to_all_badly(group: Group, x: Any) -> object:
    unit = len(x(1))
    expected = [2, 2, 2] if group.rank < 2 else [2, 3, 2]
    group.received = [x(sum(expected))]  # type: ignore[attr-defined]
    return group.all_to_all(
        group.received[0],  # type: ignore[attr-defined]
        x(6),
        [n * unit for n in expected],
        [2 * unit] * 3,
    )


# What each rank offers must be what the taker expects; else all are told, all of it.
OFFERS: dict[str, tuple[Callable[[Group, Any], object], str]] = {
    "all_gather": (
        lambda g, x: uneven([[5] * 3, [5] * 3, [6] * 3])(g, x),
        "rank 0 expects 5 elements of rank 2, which offers 6; "
        "rank 1 expects 5 elements of rank 2, which offers 6; "
        "rank 2 expects 6 elements of rank 0, which offers 5; "
        "rank 2 expects 6 elements of rank 1, which offers 5",
    ),
    "all_gather, one taker errs": (
        lambda g, x: uneven([[5, 6, 7], [5, 6, 8], [5, 6, 7]])(g, x),
        "rank 1 expects 8 elements of rank 2, which offers 7",
    ),
    "gather": (
        gather_to_1,
        "rank 1 expects 5 elements of rank 0, which offers 4; "
        "rank 1 expects 7 elements of rank 2, which offers 8",
    ),
    "scatter": (
        scatter_from_0,
        "rank 2 expects 5 elements of rank 0, which offers 7",
    ),
    "all_to_all": (
        all_to_all_badly,
        "rank 2 expects 3 elements of rank 1, which offers 2",
    ),
}


def offer_badly(rank: int, world: int, case: str, unit: int) -> tuple[BaseException, bool]:
    with Group.from_env(timeout_s=30) as group:
        group.barrier()

        def x(count: int) -> Any:
            return np.full(count * unit, 7, np.float32)

        with pytest.raises(CollectiveMismatchError) as caught:
            OFFERS[case][0](group, x)
        received = group.received  # type: ignore[attr-defined]
        return caught.value, all(bool((part == 7).all()) for part in received)


@pytest.mark.parametrize("unit", [1, 30_000])
@pytest.mark.parametrize("case", OFFERS)
def test_mismatch_of_pieces(rank_pool: Pool, case: str, unit: int) -> None:
    what = re.sub(r"\b\d+(?= elements)", lambda m: str(int(m[0]) * unit), OFFERS[case][1])
    what = re.sub(r"(?<=offers )\d+", lambda m: str(int(m[0]) * unit), what)
    for rank, (error, unchanged) in enumerate(rank_pool(3).run(offer_badly, case, unit)):
        assert str(error).startswith(f"[rank {rank}/3] "), str(error)
        assert f": {what} (last completed: barrier #1). Hint: " in str(error), str(error)
        assert isinstance(error, SdpError) and error.seq == 2 and unchanged


def gather(dtype: str, *shape: int) -> Callable[[Group], object]:
    return lambda group: gather_uneven(group, np.ones(shape, dtype))


def broadcast(*dtypes: str) -> Callable[[Group], object]:
    return lambda group: broadcast_arrays(group, [np.ones(4, dtype) for dtype in dtypes], 0)


# What all ranks but the last call with arrays, what that one calls, and what is told of both.
ARRAYS: dict[str, tuple[Callable[[Group], object], Callable[[Group], object], str]] = {
    "type of rows": (
        gather("float32", 5, 3),
        gather("int32", 5, 3),
        "gather: ranks disagree: ranks 0, 1: rows of float32[3]; rank 2: rows of int32[3]",
    ),
    "shape of rows": (
        gather("float32", 2, 2, 3),
        gather("float32", 2, 3, 2),
        "gather: ranks disagree: ranks 0, 1: rows of float32[2, 3]; rank 2: rows of float32[3, 2]",
    ),
    "type that moves as bytes": (
        gather("uint32", 6),
        gather("uint16", 12),
        "gather: ranks disagree: ranks 0, 1: rows of uint32[]; rank 2: rows of uint16[]",
    ),
    "type of an array": (
        broadcast("float32", "float32"),
        broadcast("float32", "int32"),
        "broadcast: ranks disagree: ranks 0, 1: array 1 is float32[4]; rank 2: array 1 is int32[4]",
    ),
    "number of arrays": (
        broadcast("float32", "int8"),
        broadcast("float32"),
        "broadcast: ranks disagree: ranks 0, 1: array 1 is int8[4]; rank 2: nothing",
    ),
}


def pass_others(rank: int, world: int, case: str) -> BaseException:
    group = kept_group()
    usual, other, _ = ARRAYS[case]
    with pytest.raises(CollectiveMismatchError) as caught:
        (other if rank == world - 1 else usual)(group)
    group.barrier()  # nothing has moved, so the group works
    return caught.value


@pytest.mark.parametrize("case", ARRAYS)
def test_mismatch_of_arrays(rank_pool: Pool, case: str) -> None:
    for rank, error in enumerate(rank_pool(3).run(pass_others, case)):
        told = f"[rank {rank}/3] {ARRAYS[case][2]}. Hint: all ranks have to pass arrays of the same"
        assert str(error).startswith(told), str(error)
        assert isinstance(error, SdpError) and error.ranks == (2,)


def gather_all_types(rank: int, world: int) -> None:
    for dtype in ("float32", "bool", "uint32", "complex64"):
        rows = np.arange(2 * (rank + 1)).reshape(-1, 2).astype(dtype)
        whole = gather_uneven(kept_group(), rows)
        expected = [np.arange(2 * (other + 1)).reshape(-1, 2) for other in range(world)]
        np.testing.assert_array_equal(whole, np.concatenate(expected).astype(dtype))
        assert whole.dtype == dtype


def test_rows_of_any_type(rank_pool: Pool) -> None:
    rank_pool(3).run(gather_all_types)
