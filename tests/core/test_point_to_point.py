"""send and recv: sizes, order, tags, any source, both directions, and what can go wrong."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from sdp_plugins.core import (
    Group,
    Work,
)
from tests.core.failing import now
from tests.core.kept_group import kept_group
from tests.core.values import as_input, same_bits, storage, values
from tests.ranks import Pool

COUNTS = (0, 1, 7, 1000, 40_961, 2**20 + 3)  # the last ones are larger than the channel
DTYPES = ("uint8", "bfloat16", "float32", "complex128")
LARGE = 2**20


def wait(work: Work | None) -> None:
    assert work is not None
    work.wait()


# ---- what arrives -------------------------------------------------------------------------------


def pass_around(rank: int, world: int, dtype: str) -> list[str]:
    """A ring, with blocking and asynchronous calls on either side."""
    group = kept_group()
    after, before = (rank + 1) % world, (rank - 1) % world
    wrong = []
    for count in COUNTS:
        for asynchronous in (False, True):
            mine, got = values(dtype, count, rank), np.zeros(count, storage(dtype))
            sent = group.send(as_input(mine, dtype), after, async_op=True)
            work = group.recv(as_input(got, dtype), before, async_op=asynchronous)
            work.wait()
            wait(sent)
            if not same_bits(got, values(dtype, count, before)) or work.source_rank != before:
                wrong.append(f"{dtype}[{count}] {'async' if asynchronous else 'blocking'}")
    return wrong


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size(rank_pool: Pool, world: int, dtype: str) -> None:
    assert rank_pool(world).run(pass_around, dtype) == [[]] * world


def send_blocking(rank: int, world: int) -> float:
    """One after the other; what is small needs no receiver yet, what is large waits for it."""
    group = kept_group()
    data = np.full(LARGE, 5.0)
    if rank == 0:
        for count in (10, LARGE):
            start = now()
            group.send(data[:count], 1)
            waited = now() - start
            group.recv(data[:1], 1)
        return waited
    time.sleep(0.3)
    got = np.zeros(LARGE)
    for count in (10, LARGE):
        if count == LARGE:
            time.sleep(0.3)
        group.recv(got[:count], 0)
        assert (got[:count] == 5).all()
        group.send(got[:1], 0)
    return 0


def test_blocking_send_waits_for_the_receiver_of_a_large_message(rank_pool: Pool) -> None:
    waited, _ = rank_pool(2).run(send_blocking)
    assert 0.2 < waited < 5


def both_ways(rank: int, world: int) -> list[str]:
    """Large messages between all pairs at once, several each."""
    group = kept_group()
    others = [r for r in range(world) if r != rank]
    sends, recvs = [], []
    for turn in range(3):
        for peer in others:
            data = np.full(LARGE, 100 * turn + rank, np.float32)
            sends.append(group.send(data, peer, async_op=True))
            got = np.zeros(LARGE, np.float32)
            recvs.append((turn, peer, got, group.recv(got, peer, async_op=True)))
    for work in sends:
        wait(work)
    wrong = []
    for turn, peer, got, work in recvs:
        work.wait()
        if not (got == 100 * turn + peer).all():
            wrong.append(f"{turn} from {peer}")
    return wrong


@pytest.mark.parametrize("world", [2, 4])
def test_both_directions_at_once(rank_pool: Pool, world: int) -> None:
    assert rank_pool(world).run(both_ways) == [[]] * world


# ---- order and tags -----------------------------------------------------------------------------


def keep_order(rank: int, world: int) -> list[int]:
    """Many messages of one tag, of very different sizes, arrive as they were sent."""
    group = kept_group()
    sizes = [(turn * 7919) % 3000 * (50 if turn % 20 == 0 else 1) for turn in range(200)]
    if rank == 0:
        for work in [
            group.send(np.full(size, turn), 1, async_op=True) for turn, size in enumerate(sizes)
        ]:
            wait(work)
        return []
    wrong = []
    for turn, size in enumerate(sizes):
        got = np.zeros(size, np.int64)
        group.recv(got, 0)
        if not (got == turn).all():
            wrong.append(turn)
    return wrong


def test_messages_of_a_pair_arrive_in_order(rank_pool: Pool) -> None:
    assert rank_pool(2).run(keep_order) == [[], []]


def mix_tags(rank: int, world: int) -> list[str]:
    """Received in another order than sent: by tag, small and large, posted before and after."""
    group = kept_group()
    sizes = {3: 10, 1: 200_000, 2: 0, 7: 50_000, 2**32 - 1: 5}
    if rank == 0:
        works = [
            group.send(np.full(n, tag), 1, tag, async_op=True)
            for tag, n in sizes.items()
            for _ in range(2)
        ]
        for work in works:
            wait(work)
        return []
    early = np.zeros(5, np.int64)
    posted = group.recv(early, 0, 2**32 - 1, async_op=True)
    wrong = []
    for tag in (7, 2, 1, 3, 2, 3, 1, 7):
        got = np.zeros(sizes[tag], np.int64)
        group.recv(got, 0, tag)
        if not (got == tag).all():
            wrong.append(f"tag {tag}")
    posted.wait()
    last = np.zeros(5, np.int64)
    group.recv(last, 0, 2**32 - 1)
    if not (early == 2**32 - 1).all() or not (last == 2**32 - 1).all():
        wrong.append("the largest tag")
    return wrong


def test_tags_out_of_order(rank_pool: Pool) -> None:
    assert rank_pool(2).run(mix_tags) == [[], []]


def receive_from_any(rank: int, world: int) -> list[tuple[int, int]]:
    """(source, what it sent) of each message, tag 1 first."""
    group = kept_group()
    if rank > 0:
        for tag in (2, 1):
            group.send(np.full(30_000, 10 * rank + tag), 0, tag)
        return []
    found = []
    for tag in (1, 2):
        posted = []
        for _ in range(world - 1):
            got = np.zeros(30_000, np.int64)
            posted.append((got, group.recv(got, None, tag, async_op=True)))
        for got, work in posted:
            work.wait()
            assert (got == got[0]).all()
            found.append((work.source_rank, int(got[0])))
    return found


def test_any_source(rank_pool: Pool) -> None:
    found, *_ = rank_pool(4).run(receive_from_any)
    assert sorted(found[:3]) == [(1, 11), (2, 21), (3, 31)]
    assert sorted(found[3:]) == [(1, 12), (2, 22), (3, 32)]


def choose_between_sources(rank: int, world: int) -> list[int]:
    """A receive from one rank leaves another's earlier message for one from any."""
    group = kept_group()
    if rank > 0:
        if rank == 2:
            time.sleep(0.2)
        group.send(np.array([rank]), 0)
        return []
    sources = []
    for src in (2, None):
        got = np.zeros(1, np.int64)
        work = group.recv(got, src)
        assert got[0] == work.source_rank
        sources.append(work.source_rank)
    return sources


def test_one_source_before_any(rank_pool: Pool) -> None:
    assert rank_pool(3).run(choose_between_sources)[0] == [2, 1]


def talk_beside_collectives(rank: int, world: int) -> list[float]:
    """send and recv have a lane of their own: they go on while a collective waits."""
    group = kept_group()
    data, got = np.ones(LARGE), np.zeros(LARGE)
    if rank == 0:
        pending = group.all_reduce(data, async_op=True)
        group.send(np.full(LARGE, 3.0), 1)
        group.recv(got, 1)
        assert pending is not None and not pending.is_completed()
        group.send(np.zeros(1), 1)
        pending.wait()
    else:
        group.recv(got, 0)
        group.send(np.full(LARGE, 4.0), 0)
        group.recv(np.zeros(1), 0)
        group.all_reduce(data)
    return [float(got[0]), float(data[-1])]


def test_beside_a_waiting_collective(rank_pool: Pool) -> None:
    assert rank_pool(2).run(talk_beside_collectives) == [[4.0, 2.0], [3.0, 2.0]]


def drop_handles(rank: int, world: int) -> float:
    """Nobody holds the buffers or the handles."""
    group = kept_group()
    for turn in range(20):
        group.send(np.full(100_000, float(turn)), 1 - rank, async_op=True)
    for _ in range(19):
        group.recv(np.zeros(100_000), 1 - rank, async_op=True)
    got = np.zeros(100_000)
    group.recv(got, 1 - rank)
    return float(got[-1])


def test_dropped_handles_and_buffers(rank_pool: Pool) -> None:
    assert rank_pool(2).run(drop_handles) == [19.0, 19.0]


# ---- calls that are wrong -----------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Group], object], type[Exception], str]] = {
    "to oneself": (
        lambda g: g.send(np.zeros(3), g.rank),
        ValueError,
        r"send: destination \d is not another rank of this group of 2",
    ),
    "from oneself": (
        lambda g: g.recv(np.zeros(3), g.rank),
        ValueError,
        r"recv: source \d is not another rank of this group of 2",
    ),
    "to nobody": (
        lambda g: g.send(np.zeros(3), 2),
        ValueError,
        "send: destination 2 is not another rank of this group of 2",
    ),
    "from nobody": (
        lambda g: g.recv(np.zeros(3), -1),
        ValueError,
        "recv: source -1 is not another rank of this group of 2",
    ),
    "negative tag": (
        lambda g: g.send(np.zeros(3), 1 - g.rank, -1),
        ValueError,
        r"send: tag -1 is not between 0 and 2\^32 - 1",
    ),
    "large tag": (
        lambda g: g.recv(np.zeros(3), 1 - g.rank, 2**32),
        ValueError,
        r"recv: tag 4294967296 is not between 0 and 2\^32 - 1",
    ),
    "read-only": (
        lambda g: g.recv(b"123", 1 - g.rank),
        ValueError,
        "the array is read-only, but would be written",
    ),
}


def call_wrongly(rank: int, world: int, case: str) -> None:
    call, kind, text = WRONG[case]
    group = kept_group()
    with pytest.raises(kind, match=text):
        call(group)
    got = np.zeros(1)
    group.send(np.full(1, rank + 1.0), 1 - rank)
    group.recv(got, 1 - rank)
    assert got[0] == 2 - rank


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls(rank_pool: Pool, case: str) -> None:
    rank_pool(2).run(call_wrongly, case)
