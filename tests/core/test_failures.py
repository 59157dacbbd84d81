"""What is left after failures: nothing."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from sdp_plugins.core import Group, PeerLostError, SdpError
from tests.core.failing import reduce_until_it_fails
from tests.leaks import no_leaks, shared_memory
from tests.ranks import Pool, start_ranks


def fail_and_leave_nothing(rank: int, world: int) -> None:
    group = None
    with Group.from_env(name="issued", timeout_s=30) as issued, no_leaks():
        for _ in range(3):
            group = Group.from_env(timeout_s=30)
            group.allocate(2**20)
            group.barrier()
            count = 2 if rank == 0 else 3  # the third cannot succeed
            works = [group.all_reduce(np.zeros(2**17), async_op=True) for _ in range(count)]
            works.append(group.recv(np.zeros(3), (rank + 1) % world, async_op=True))
            issued.barrier()
            if rank == 0:
                group.abort("on purpose")
            for work in works[2:]:
                assert work is not None
                with pytest.raises(PeerLostError):
                    work.wait()
            group.close()
            group.close()
            with pytest.raises(SdpError, match=r"is closed\. Hint: make a new group"):
                group.barrier()
            assert group.closed
            del group, works


def test_nothing_is_left_after_a_failure(rank_pool: Pool) -> None:
    rank_pool(3).run(fail_and_leave_nothing)


SCRIPT = """
import numpy as np, os, sys
from sdp_plugins.core import Group
def main(rank, world, how):
    global group, work, view
    group = Group.from_env(timeout_s=30)
    view = group.allocate(2**20)
    data = np.ones(2**18, np.float32)
    for _ in range(3):
        work = group.all_reduce(data, async_op=True)
    group.send(data[:3], 1 - rank, async_op=True)
    if how == "done":
        work.wait()
    import builtins
    builtins.kept_for_ever = (group, work)
"""


@pytest.mark.parametrize("how", ["done", "pending"])
def test_a_script_that_never_closes_ends_cleanly(how: str) -> None:
    """No crash, no hang and no word at the interpreter's end."""
    with start_ranks(2, SCRIPT, how) as ranks:
        ranks.results()
        ranks.finish()
        assert [rank.output() for rank in ranks] == ["", ""]


def test_killed_ranks_leave_nothing() -> None:
    before = shared_memory()
    with start_ranks(3, reduce_until_it_fails, "zero-copy") as ranks:
        for rank in ranks:
            assert rank.heard() == "going"
        for rank in ranks:
            rank.kill()
    assert shared_memory() <= before


def usage() -> dict[str, int]:
    """How much of the machine this process holds."""
    gc.collect()  # what earlier cases have left in cycles
    with open("/proc/self/maps") as maps:
        mappings = sum(1 for _ in maps)
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": mappings,
    }


def make_many(rank: int, world: int) -> tuple[dict[str, int], dict[str, int]]:
    def once(turn: int) -> None:
        group = Group.from_env(name=f"g{turn % 2}", timeout_s=30)
        data = np.frombuffer(group.allocate(2**17), np.float32)
        group.all_reduce(data, async_op=True)
        group.send(np.zeros(3), 1 - rank, async_op=True)
        group.recv(np.zeros(3), 1 - rank)
        child = group.new_group([1, 0])
        assert child is not None
        child.barrier()
        child.close()
        group.close()

    for turn in range(20):
        once(turn)
    before = usage()
    for turn in range(180):
        once(turn)
    return before, usage()


def test_two_hundred_groups(rank_pool: Pool) -> None:
    for before, after in rank_pool(2).run(make_many):
        assert after["fds"] == before["fds"] and after["threads"] == before["threads"]
        assert after["mappings"] <= before["mappings"] + 10  # the allocator's own
