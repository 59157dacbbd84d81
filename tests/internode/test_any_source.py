"""Receives from any rank across nodes: whoever sends first, from this node or another one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import CollectiveTimeoutError, Group, SdpError
from tests.internode.random_messages import run_round
from tests.internode.spanning import LAYOUTS, meet, spanning_group
from tests.ranks import Pool

LAYOUTS_HERE = ("2x2", "3x1", "interleaved", "3+1")
LARGE = 700_001
"""Elements; many times the ring between two ranks of a node."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("groups"))


def numbers(count: int, start: int) -> Any:
    return np.arange(start, start + count, dtype=np.int32)


def receive_all(group: Group, each: int, count: int, tag: int) -> None:
    """One by one: each sender's come in order."""
    next_of = dict.fromkeys(set(range(group.world_size)) - {group.rank}, 0)
    for _ in range(each * len(next_of)):
        buffer = np.full(count, -1, np.int32)
        work = group.recv(buffer, None, tag)
        source = work.source_rank
        assert (buffer == numbers(count, 1000 * source + next_of[source])).all()
        next_of[source] += 1
    assert set(next_of.values()) == {each}


def gather_from_any(rank: int, world: int, layout: str, root: str, count: int) -> None:
    group = spanning_group(layout, root)
    each = 3 if count == LARGE else 10
    for receiver in range(world):
        if rank == receiver:
            receive_all(group, each, count, 5)
        else:
            for number in range(each):
                group.send(numbers(count, 1000 * rank + number), receiver, 5)
    group.barrier()


@pytest.mark.parametrize("count", [0, 1, 5000, LARGE])
@pytest.mark.parametrize("layout", LAYOUTS_HERE)
def test_messages_of_all_ranks(rank_pool: Pool, root: str, layout: str, count: int) -> None:
    rank_pool(len(LAYOUTS[layout])).run(gather_from_any, layout, root, count)


def several_at_once(rank: int, world: int, layout: str, root: str) -> None:
    """Receives that wait together are served in the order in which they were posted."""
    group = spanning_group(layout, root)
    others = [other for other in range(world) if other != rank]
    wanted = {tag: [np.zeros(4, np.int32) for _ in range(2 * len(others))] for tag in (1, 2)}
    works = {
        tag: [group.recv(buffer, None, tag, async_op=True) for buffer in buffers]
        for tag, buffers in wanted.items()
    }
    group.barrier()
    sums = [np.ones(10_000) for _ in range(3)]
    reductions = [group.all_reduce(data, async_op=True) for data in sums]
    for number in range(2):
        for tag in (2, 1):  # the first to be sent is not the first that is waited for
            for other in others:
                group.send(numbers(4, 100 * rank + 10 * tag + number), other, tag)
    for tag, buffers in wanted.items():
        found: dict[int, list[int]] = {other: [] for other in others}
        for buffer, work in zip(buffers, works[tag], strict=True):
            work.wait()
            found[work.source_rank].append(int(buffer[0]))
        assert found == {o: [100 * o + 10 * tag + number for number in range(2)] for o in others}
    for data, reduction in zip(sums, reductions, strict=True):
        assert reduction is not None
        reduction.wait()
        assert (data == world).all()


@pytest.mark.parametrize("layout", LAYOUTS_HERE)
def test_several_receives_wait_together(rank_pool: Pool, root: str, layout: str) -> None:
    rank_pool(len(LAYOUTS[layout])).run(several_at_once, layout, root)


def named_and_any(rank: int, world: int, layout: str, root: str) -> None:
    """A receive from one rank leaves another's message for one from any, whichever comes first."""
    group = spanning_group(layout, root)
    if rank == 0:
        named, either = np.zeros(2, np.int32), np.zeros(2, np.int32)
        first = group.recv(named, world - 1, 3, async_op=True)
        second = group.recv(either, None, 3, async_op=True)
        group.send(numbers(1, 0), 1, 4)
        second.wait()
        assert second.source_rank == 1 and (either == numbers(2, 1)).all()
        assert not first.is_completed()
        group.send(numbers(1, 0), world - 1, 4)
        first.wait()
        assert (named == numbers(2, world - 1)).all()
    elif rank in (1, world - 1):
        group.recv(np.zeros(1, np.int32), 0, 4)
        group.send(numbers(2, rank), 0, 3)
    group.barrier()


@pytest.mark.parametrize("layout", LAYOUTS_HERE)
def test_receives_from_one_and_from_any(rank_pool: Pool, root: str, layout: str) -> None:
    rank_pool(len(LAYOUTS[layout])).run(named_and_any, layout, root)


def hold_back(rank: int, world: int, root: str) -> None:
    """What a receive from any no longer needs stays with its sender, until somebody wants it."""
    group = spanning_group("1+2", root)
    go = np.zeros(1, np.int32)
    if rank == 0:
        group.recv(go, 1, 2)
        sent = group.send(numbers(LARGE, 7), 1, 1, async_op=True)
        assert sent is not None
        with pytest.raises(CollectiveTimeoutError, match="timeout of this wait"):
            sent.wait(0.5)
        group.send(go, 2, 3)
        sent.wait()
    if rank == 1:
        assert group.recv(go, None, 1).source_rank == 2
        group.send(go, 0, 2)  # which may send now
        group.recv(go, 2, 3)
        large = np.zeros(LARGE, np.int32)
        assert group.recv(large, None, 1).source_rank == 0
        assert (large == numbers(LARGE, 7)).all()
    if rank == 2:
        group.send(go, 1, 1)
        group.recv(go, 0, 3)
        group.send(go, 1, 3)
    group.barrier()


def test_what_nobody_wants_any_more_holds_its_sender_back(rank_pool: Pool, root: str) -> None:
    rank_pool(3).run(hold_back, root)


def count_threads(rank: int, world: int, root: str) -> None:
    before = set(threading.enumerate())

    def receivers() -> set[str]:
        names = {thread.name for thread in set(threading.enumerate()) - before}
        return {name for name in names if name.startswith("sdp-recv")}

    with meet("3x1", root, "threads") as group:
        sent = group.send(np.ones(3), (rank + 1) % world, async_op=True)
        group.recv(np.ones(3), (rank - 1) % world)
        assert sent is not None
        sent.wait()
        assert receivers() == {f"sdp-recv-{(rank - 1) % world}"}
        received = group.recv(np.ones(3), None, 1, async_op=True)
        assert receivers() == {f"sdp-recv-{other}" for other in range(world) if other != rank}
        group.barrier()
    assert isinstance(received.exception(), SdpError)
    assert not receivers()


def test_who_receives_from_one_has_one_thread(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool(3).run(count_threads, str(tmp_path))


def random_rounds(rank: int, world: int, layout: str, root: str, seed: int, rounds: int) -> None:
    group = spanning_group(layout, root)
    for number in range(rounds):
        run_round(group, number, seed)
    group.barrier()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("layout", [*LAYOUTS_HERE, "4x1"])
def test_random_programs(rank_pool: Pool, root: str, layout: str, seed: int) -> None:
    rank_pool(len(LAYOUTS[layout])).run(random_rounds, layout, root, seed, 8)
