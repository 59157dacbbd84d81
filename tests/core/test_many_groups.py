"""Many groups at once, and several jobs: none waits for or breaks another."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from sdp_plugins.core import (
    CollectiveMismatchError,
    Group,
    PeerLostError,
)
from tests.core.test_groups import total
from tests.ranks import Pool, free_port, start_ranks

# ---- many groups at once ------------------------------------------------------------------------

SUBSETS = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3], [0, 1, 2], [1, 2, 3], [3, 2, 1, 0]]


def work_in_any_order(rank: int, world: int) -> list[str]:
    """Each rank issues its groups' operations in an order of its own, and waits in another."""
    wrong = []
    with Group.from_env(timeout_s=30) as world_group:
        groups = [(members, world_group.new_group(members)) for members in SUBSETS]
        mine = [(members, group) for members, group in groups if group is not None]
        random = np.random.default_rng(rank)
        for turn in range(10):
            issued = []
            for index in random.permutation(len(mine)):
                members, group = mine[index]
                data = np.full(50_000 if turn % 2 else 5, float(rank + 1))
                work = group.all_reduce(data, async_op=True)
                issued.append((members, work, data))
            for index in random.permutation(len(issued)):
                members, work, data = issued[index]
                assert work is not None
                work.wait()
                if not (data == sum(members) + len(members)).all():
                    wrong.append(f"turn {turn} {members}")
        for _, group in reversed(mine):
            group.close()
    return wrong


def test_groups_used_in_different_orders(rank_pool: Pool) -> None:
    assert rank_pool(4).run(work_in_any_order) == [[]] * 4


def work_in_threads(rank: int, world: int) -> list[str]:
    """Blocking calls on several groups, each in a thread; and two threads on one group."""
    wrong: list[str] = []

    def reduce_often(group: Group, offset: int) -> None:
        for turn in range(100):
            data = np.full(7, float(turn + offset))
            group.all_reduce(data, "max")
            if not (data == turn + offset).all():
                wrong.append(f"{group.name} {turn}")

    with Group.from_env(timeout_s=30) as world_group:
        groups = [world_group.new_group(range(world), name=f"g{i}") for i in range(3)]
        threads = [
            threading.Thread(target=reduce_often, args=(group, i)) for i, group in enumerate(groups)
        ]
        for thread in threads[:: 1 if rank else -1]:
            thread.start()
        for thread in threads:
            thread.join()
        shared = [
            threading.Thread(target=lambda: [world_group.barrier() for _ in range(50)])
            for _ in range(3)
        ]
        for thread in shared:
            thread.start()
        for thread in shared:
            thread.join()
        for group in groups:
            assert group is not None
            group.close()
    return wrong


def test_groups_used_in_threads(rank_pool: Pool) -> None:
    assert rank_pool(2).run(work_in_threads) == [[], []]


def fail_one(rank: int, world: int) -> tuple[float, float]:
    """The failure of one group is none of another."""
    with Group.from_env(timeout_s=30) as world_group:
        bad = world_group.new_group(range(world))
        good = world_group.new_group(range(world))
        assert bad is not None and good is not None
        with pytest.raises(CollectiveMismatchError):
            bad.all_reduce(np.zeros(rank + 1))
        with pytest.raises(CollectiveMismatchError):
            bad.barrier()
        bad.close()
        again = world_group.new_group(range(world))
        assert again is not None
        results = (total(good, 1), total(again, 2))
        good.close()
        again.close()
        return results


def test_a_failed_group_leaves_the_others_alone(rank_pool: Pool) -> None:
    assert rank_pool(3).run(fail_one) == [(3.0, 6.0)] * 3


def close_first(rank: int, world: int) -> float:
    """A rank that closes right after its last operation is not taken for lost by slower ones."""
    value = 0.0
    for turn in range(40):
        group = Group.from_env(name=f"turn {turn}", timeout_s=30)
        group.send(np.zeros(3), (rank + 1) % world, async_op=True)
        group.recv(np.zeros(3), (rank - 1) % world)
        value = total(group, 1)
        group.close()
    return value


def test_closing_right_after_the_last_operation(rank_pool: Pool) -> None:
    assert rank_pool(4).run(close_first) == [4.0] * 4


# ---- several jobs -------------------------------------------------------------------------------


def sum_many(rank: int, world: int, base: float) -> list[float]:
    values = []
    for turn in range(5):
        with Group.from_env(timeout_s=30) as group:
            values.append(total(group, base + rank + turn))
    return values


def test_two_jobs_with_one_master_port() -> None:
    """Same address and port, different SDP_JOB_ID: the way out of a clash."""
    port = str(free_port())
    environment = {"MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    with (
        start_ranks(2, sum_many, 0.0, env={**environment, "SDP_JOB_ID": "one"}) as one,
        start_ranks(2, sum_many, 100.0, env={**environment, "SDP_JOB_ID": "two"}) as two,
    ):
        first, second = one.results(), two.results()
    assert first == [[1.0 + 2 * turn for turn in range(5)]] * 2
    assert second == [[201.0 + 2 * turn for turn in range(5)]] * 2


def lose_one(rank: int, world: int) -> float:
    """A parent and a sub-group without the lost rank: only who needs it fails."""
    world_group = Group.from_env(timeout_s=30)
    pair = world_group.new_group([0, 1])
    if pair is None:
        os._exit(0)
    with pytest.raises(PeerLostError, match="rank 2"):
        world_group.all_reduce(np.zeros(3))
    return total(pair, 5)


def test_a_sub_group_survives_a_rank_outside_of_it() -> None:
    with start_ranks(3, lose_one) as ranks:
        assert [ranks[0].result(), ranks[1].result()] == [10.0, 10.0]


def begin_messages(rank: int, world: int) -> list[str]:
    """What errors of different groups begin with."""
    found = []
    with Group.from_env(timeout_s=30) as whole:
        parts = [whole.new_group([1, 0]), whole.new_group([1, 3], name="pair [b]")]
        everyone = whole.new_group(range(world), name="twin")
        for group in (*parts, everyone, whole):
            if group is None:
                continue
            data = np.zeros(4 + group.rank, np.float32)
            with pytest.raises(CollectiveMismatchError) as caught:
                group.all_reduce(data)
            found.append(str(caught.value).partition("all_reduce")[0])
            group.close()
    return found


def test_errors_tell_which_group(rank_pool: Pool) -> None:
    """All ranks are called by their numbers in the job."""
    swapped = "in group default/1,0 (ranks 0, 1)"
    pair = "in group pair [b] (ranks 1, 3)"
    twin = "in group twin (ranks 0-3)"
    assert rank_pool(4).run(begin_messages) == [
        [f"[rank 0 {swapped}] ", f"[rank 0 {twin}] ", "[rank 0/4] "],
        [f"[rank 1 {swapped}] ", f"[rank 1 {pair}] ", f"[rank 1 {twin}] ", "[rank 1/4] "],
        [f"[rank 2 {twin}] ", "[rank 2/4] "],
        [f"[rank 3 {pair}] ", f"[rank 3 {twin}] ", "[rank 3/4] "],
    ]
