"""Plans of several levels, and several buffers in flight, among ranks of several nodes."""

from __future__ import annotations

import time
from functools import lru_cache

import numpy as np
import pytest

from sdp_plugins.core import Group
from sdp_plugins.core.internode.plan import Algorithm, Plan, factorings
from tests.core.values import Array, as_input, reduced, same_bits, values
from tests.internode.spanning import LAYOUTS, LAYOUTS_OF_PLANS, only, spanning_group
from tests.ranks import Pool

NODES = LAYOUTS | LAYOUTS_OF_PLANS


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("stores"))


@lru_cache(32)
def reduction(world: int, dtype: str, op: str, count: int, first: int = 0) -> Array:
    """Of every rank's values, as if the first rank were another."""
    return reduced([values(dtype, count, first + r) for r in range(world)], dtype, op)


def reduce_by(rank: int, world: int, layout: str, root: str, plan: Plan) -> list[str]:
    group = spanning_group(layout, root)
    wrong = []
    with only(plan):
        for dtype, count in (("float32", 100_003), ("bfloat16", 70_001), ("float32", 3)):
            for op in ("sum", "avg", "max"):
                data = values(dtype, count, rank)
                group.all_reduce(as_input(data, dtype), op)
                if not same_bits(data, reduction(world, dtype, op, count)):
                    wrong.append(f"{plan}: {dtype} {op}")
    return wrong


@pytest.mark.parametrize(
    ("layout", "radices"),
    [
        (name, radices)
        for name in ("4x1", "8x1", "4x2", "6x1")
        for radices in factorings(int(name[0]))
    ],
)
def test_every_plan_gives_the_same_bits(
    rank_pool: Pool, root: str, layout: str, radices: tuple[int, ...]
) -> None:
    world = len(NODES[layout])
    for algorithm in Algorithm:
        plan = Plan(algorithm, radices, 64 * 1024)
        assert rank_pool(world).run(reduce_by, layout, root, plan) == [[]] * world


def many_in_flight(
    rank: int, world: int, layout: str, root: str, radices: tuple[int, ...], late: int
) -> list[int]:
    """Buffers of many sizes, all queued at once; one rank may be late with every other one."""
    group = spanning_group(layout, root)
    counts = [200_000, 10, 70_000, 300_001, 0, 1, 500_000, 40_000, 40_000, 123_456]
    buffers = [values("float32", count, rank + i) for i, count in enumerate(counts)]
    with only(Plan(Algorithm.sharded, radices, 128 * 1024)):
        works = []
        for number, buffer in enumerate(buffers):
            if rank == late and number % 2:
                time.sleep(0.02)
            works.append(group.all_reduce(buffer, async_op=True))
        for work in works:
            assert work is not None
            work.wait()
    return [
        i
        for i, count in enumerate(counts)
        if not same_bits(buffers[i], reduction(world, "float32", "sum", count, first=i))
    ]


@pytest.mark.parametrize("late", [-1, 0, 1, 3])
@pytest.mark.parametrize(
    ("layout", "radices"), [("2x2", (2,)), ("4x1", (4,)), ("4x1", (2, 2)), ("4x2", (2, 2))]
)
def test_buffers_in_flight(
    rank_pool: Pool, root: str, layout: str, radices: tuple[int, ...], late: int
) -> None:
    world = len(NODES[layout])
    assert rank_pool(world).run(many_in_flight, layout, root, radices, late) == [[]] * world


def twice(rank: int, world: int, layout: str, root: str) -> list[float]:
    """Two operations on the same memory, and two that share an end of it, queued at once."""
    group = spanning_group(layout, root)
    x = np.full(300_000, rank + 1, np.float32)
    with only(Plan(Algorithm.sharded, (2,), 64 * 1024)):
        works = [group.all_reduce(x, async_op=True) for _ in range(3)]
        y = np.full(300_000, rank + 1, np.float32)
        works.append(group.all_reduce(y[:200_000], async_op=True))
        works.append(group.all_reduce(y[199_999:], async_op=True))
        for work in works:
            assert work is not None
            work.wait()
    return [*np.unique(x).tolist(), *y[[0, 199_998, 199_999, 200_000, 299_999]].tolist()]


@pytest.mark.parametrize("layout", ["2x1", "2x2"])
def test_operations_on_the_same_memory_are_in_order(
    rank_pool: Pool, root: str, layout: str
) -> None:
    world = len(NODES[layout])
    total = sum(range(1, world + 1))
    expected = [total * world**2, total, total, total * world, total, total]
    for _ in range(5):
        assert rank_pool(world).run(twice, layout, root) == [expected] * world


def add_bools(rank: int, world: int, layout: str, root: str, plan: Plan) -> list[list[int]]:
    """Any byte may lie in a bool's memory; what is stored is 0 or 1."""
    group = spanning_group(layout, root)
    found = []
    with only(plan):
        for op in ("sum", "product", "max"):
            x = np.array([2, 2, 0, 1] * 1000, np.uint8) if rank else np.full(4000, 4, np.uint8)
            group.all_reduce(x.view(np.bool_), op)
            found.append(x[:4].tolist())
    return found


@pytest.mark.parametrize("layout", ["2x1", "4x1"])
@pytest.mark.parametrize("algorithm", Algorithm)
def test_bools_are_0_or_1_by_every_plan(
    rank_pool: Pool, root: str, layout: str, algorithm: Algorithm
) -> None:
    world = len(NODES[layout])
    plan = Plan(algorithm, (world,), 64 * 1024)
    expected = [[1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1]]
    assert rank_pool(world).run(add_bools, layout, root, plan) == [expected] * world


def hold_back(rank: int, world: int, layout: str, root: str) -> int:
    """Rank 0 calls the second buffer long after the others have: they cannot join it."""
    group = spanning_group(layout, root)
    first, second = np.ones(10**6, np.float32), np.ones(10**6, np.float32)
    one = group.all_reduce(first, async_op=True)
    if rank == 0:
        assert one is not None
        one.wait()
        time.sleep(0.1)
    two = group.all_reduce(second, async_op=True)
    assert one is not None and two is not None
    one.wait()
    two.wait()
    return int(first.sum() + second.sum())


@pytest.mark.parametrize("layout", ["2x2", "4x1"])
def test_a_rank_that_is_not_there_yet_holds_up_nothing_before(
    rank_pool: Pool, root: str, layout: str
) -> None:
    assert rank_pool(4).run(hold_back, layout, root) == [4 * 2 * 10**6] * 4


def explained(rank: int, world: int, root: str) -> str:
    group: Group = spanning_group("2x2", root)
    return group.explain("all_reduce", 100 * 2**20)


def test_the_choice_is_explained(rank_pool: Pool, root: str) -> None:
    texts = rank_pool(4).run(explained, root)
    assert len(set(texts)) == 1, "all ranks choose the same plan"
    assert "2 nodes, reduce-scatter and all-gather, 2, in segments of 16 MiB" in texts[0]
