"""More nodes than exchange headers in one round; three to six nodes with radix 2 play as many."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from sdp_plugins.core import CollectiveMismatchError, CollectiveTimeoutError
from sdp_plugins.core.internode import agreement
from sdp_plugins.core.internode.plan import Algorithm, Plan
from tests.internode.spanning import LAYOUTS, LAYOUTS_OF_PLANS, TIMEOUT_S, meet, only
from tests.internode.test_collectives import move_all, reduce_all, run_program
from tests.ranks import Pool, Start

NODES = LAYOUTS | LAYOUTS_OF_PLANS
LIMIT_S = 2.0
"""See ``test_failures``."""


@contextmanager
def radix_two() -> Iterator[None]:
    """Have more than two nodes exchange headers in several rounds."""
    with mock.patch.object(agreement, "RADIX", 2):
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("stores"))


@pytest.mark.parametrize("nodes", [*range(2, 40), 255, 256, 257, 1000, 4096])
def test_the_rounds_spread_all_headers(nodes: int) -> None:
    held, found = 1, agreement.rounds(nodes)
    for blocks in found:
        assert len(blocks) < agreement.RADIX
        received = [at for distance, n in blocks for at in range(distance, distance + n)]
        assert received == list(range(held, held + len(received)))
        assert all(n <= held for _, n in blocks), "a round sends what was received before it"
        held += len(received)
    assert held == nodes
    assert len(found) == 1 + (nodes > 16) + (nodes > 256)


def call_two_sizes(rank: int, world: int, layout: str, root: str, less_first: bool) -> None:
    nodes = NODES[layout]
    count = len(set(nodes))
    first = nodes[rank] < count // 2
    with radix_two(), meet(layout, root, "g") as group:
        data = np.ones(2_000_000, np.float32)
        with only(Plan(Algorithm.sharded, (count,), 64 * 2**20)):
            group.all_reduce(data)
            group.all_reduce(data[:500_000] if first == less_first else data)


@pytest.mark.parametrize("less_first", [False, True])
@pytest.mark.parametrize("layout", ["2x2", "3x1", "4x1", "6x1"])
def test_halves_that_call_another_size(
    start_pooled: Start, tmp_path: Path, layout: str, less_first: bool
) -> None:
    """Data of different sizes would end gloo's processes."""
    nodes = NODES[layout]
    other = len(set(nodes)) // 2
    lower, upper = (
        [rank for rank, node in enumerate(nodes) if (node < other) is half]
        for half in (True, False)
    )
    blamed = tuple(lower if len(lower) < len(upper) else upper)
    sizes = (500_000, 2_000_000) if less_first else (2_000_000, 500_000)
    text = (
        rf"ranks disagree: ranks? [\d, -]+ on node0\b[^:]*: all_reduce #2 float32\[{sizes[0]}\] "
        rf"sum; ranks? [\d, -]+ on node{other}\b[^:]*: all_reduce #2 float32\[{sizes[1]}\] sum"
    )
    with start_pooled(len(nodes), call_two_sizes, layout, str(tmp_path), less_first) as ranks:
        found = [rank.outcome() for rank in ranks]
        assert {outcome.kind for outcome in found} == {"raised"}, found
        for outcome in found:
            assert type(outcome.error) is CollectiveMismatchError, outcome
            assert re.search(text, str(outcome.error)), outcome.error
            assert outcome.error.ranks == blamed, outcome.error


def leave_one_out(
    rank: int, world: int, layout: str, root: str, operation: str, victim: int
) -> None:
    with radix_two(), meet(layout, root, "g") as group:
        data = np.ones(100_000, np.float32)
        group.all_reduce(data)
        assert (data == world).all()
        group.timeout_s = LIMIT_S
        if rank == victim:
            time.sleep(TIMEOUT_S)
        if operation == "barrier":
            group.barrier()
        else:
            group.all_reduce(data)


@pytest.mark.parametrize(
    ("layout", "operation", "victim"),
    [
        ("3x1", "all_reduce", 0),
        ("2x2", "all_reduce", 2),
        ("6x1", "all_reduce", 3),
        ("6x1", "barrier", 0),
        ("4x2", "barrier", 3),
    ],
)
def test_a_rank_that_does_not_come(
    start_pooled: Start, tmp_path: Path, layout: str, operation: str, victim: int
) -> None:
    """Who waits for one that waits for it leaves it to that one to name it."""
    arguments = (layout, str(tmp_path), operation, victim)
    with start_pooled(len(NODES[layout]), leave_one_out, *arguments) as ranks:
        found = [rank.outcome() for rank in ranks if rank.rank != victim]
        for outcome in found:
            assert type(outcome.error) is CollectiveTimeoutError, outcome
            assert outcome.error.ranks == (victim,), outcome.error
            assert re.search(rf"rank {victim}\b.* did not a", str(outcome.error)), outcome.error


def run_radix_two(
    rank: int, world: int, run: Callable[..., list[str]], *arguments: object
) -> list[str]:
    with radix_two():
        return run(rank, world, *arguments)


@pytest.mark.parametrize("layout", ["1+2", "2x2", "4x1"])
def test_collectives(rank_pool: Pool, root: str, layout: str) -> None:
    pool = rank_pool(len(NODES[layout]))
    for run in (reduce_all, move_all):
        for count in (1000, 400_003):
            found = pool.run(run_radix_two, run, layout, root, "float32", count)
            assert found == [[]] * len(NODES[layout])


def test_random_program(rank_pool: Pool, root: str) -> None:
    assert rank_pool(3).run(run_radix_two, run_program, "3x1", root) == [[]] * 3


def meet_at_barriers(rank: int, world: int, layout: str, root: str) -> list[tuple[float, float]]:
    """When this rank has come to each of some barriers, and left it."""
    times = []
    with radix_two(), meet(layout, root, "g") as group:
        for late in range(world):
            time.sleep(0.1 * (rank == late))
            came_s = time.monotonic()
            group.barrier()
            times.append((came_s, time.monotonic()))
    return times


@pytest.mark.parametrize("layout", ["1+2", "6x1"])
def test_no_one_leaves_a_barrier_before_all_have_come(
    start_pooled: Start, tmp_path: Path, layout: str
) -> None:
    with start_pooled(len(NODES[layout]), meet_at_barriers, layout, str(tmp_path)) as ranks:
        for times in zip(*ranks.results(), strict=True):
            assert max(came_s for came_s, _ in times) <= min(left_s for _, left_s in times)
