"""What each rank of a node has done in a group, as all its ranks see it."""

from __future__ import annotations

import time

import numpy as np

from sdp_plugins.core import Group
from sdp_plugins.core.communication_log import CommunicationLog, straggler_of
from sdp_plugins.core.counters import Counters
from tests.ranks import Pool

LATE_S = 0.3


def count(rank: int, world: int) -> list[dict[int, Counters]]:
    """Rank 1 comes late to the second of two operations; then ranks 2 and 0 form a group."""
    with Group.from_env(timeout_s=60) as group:
        group.barrier()
        before = group.counters()
        group.all_reduce(np.ones(100, np.float32))
        if rank == 1:
            time.sleep(LATE_S)
        work = group.all_reduce(np.ones(100, np.float32), async_op=True)
        assert work is not None
        work.wait()
        group.barrier()
        if rank == 0:
            group.send(np.ones(7), 1)
        elif rank == 1:
            group.recv(np.ones(7), 0)
        after = group.counters()
        part = group.new_group([2, 0])
        parts = part.counters() if part else {}
        return [{r: after[r].since(before[r]) for r in after}, parts]


def test_counters(rank_pool: Pool) -> None:
    results = rank_pool(3).run(count)
    for rank, (counted, parts) in enumerate(results):
        assert list(counted) == [0, 1, 2]
        mine = counted[rank]
        assert (mine.operations, mine.nbytes) == (3, 800)
        assert mine.busy_ns >= mine.waiting_ns
        assert (mine.messages, mine.message_nbytes) == ((1, 56) if rank < 2 else (0, 0))
        late_ns = LATE_S * 1e9 / 2
        assert mine.waiting_ns < late_ns if rank == 1 else mine.waiting_ns > late_ns
        assert mine.awaited_ns > late_ns if rank == 1 else mine.awaited_ns < late_ns
        assert list(parts) == ([] if rank == 1 else [0, 1])  # by the rank in that group


def log(rank: int, world: int) -> list[dict[str, float]]:
    """Rank 1 is late in one of three periods."""
    with Group.from_env(timeout_s=60) as group:
        found, looker = [], CommunicationLog(group)
        for late in (False, True, False):
            if late and rank == 1:
                time.sleep(LATE_S)
            group.all_reduce(np.ones(100, np.float32))
            group.barrier()
            time.sleep(LATE_S)
            found.append(looker.look())
        return found


def test_what_is_logged(rank_pool: Pool) -> None:
    waiting, late = rank_pool(2).run(log)
    assert waiting[1]["smddp/straggler"] == late[1]["smddp/straggler"] == 1
    assert waiting[1]["smddp/waiting_share"] > 0.2 > late[1]["smddp/waiting_share"]
    for values in (*waiting, *late):
        assert 0 <= values["smddp/waiting_share"] <= values["smddp/communication_share"] <= 1
        assert 0 < values["smddp/bytes_per_second"] < 400 / LATE_S


def test_a_counter_that_somebody_has_reset_has_added_nothing() -> None:
    assert Counters(operations=5).since(Counters(operations=7)) == Counters()


def test_a_balanced_job_has_no_straggler() -> None:
    assert straggler_of({0: 0.13, 1: 0.11}) is None
    assert straggler_of({0: 0.001, 1: 0.0}) is None
    assert straggler_of({0: 0.05, 1: 0.3, 2: 0.1}) == 1
    assert straggler_of({0: 0.3}) == 0
