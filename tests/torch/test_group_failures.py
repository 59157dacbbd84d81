"""Groups that cannot be made, and groups anew after a failure."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp_plugins.core import PeerLostError, RendezvousError, SdpError
from sdp_plugins.torch import store_shutdown
from tests.faults import die, gave_up, stay_away
from tests.ranks import run_ranks, say, start_ranks
from tests.torch.jobs import process_group
from tests.torch.test_groups import reduce


def run_anew(rank: int, world: int) -> None:
    """The store that rank 0 serves ends with its group; nobody begins again at the old one."""
    for turn in range(8):
        with process_group(timeout=timedelta(seconds=100)):
            reduce(rank, world)
            if rank == 0:
                time.sleep(0.2 if turn % 2 else 0)


def test_begin_anew_where_rank_0_serves_the_store() -> None:
    run_ranks(3, run_anew)


def run_anew_after_a_failure(rank: int, world: int, aborted: bool) -> None:
    for turn in range(6):
        with process_group(timeout=timedelta(seconds=100)):
            if turn == 0:
                dist.barrier()
            with pytest.raises(SdpError):
                dist.all_reduce(torch.ones(4 + (rank == 0)))
            if aborted:
                dist.group.WORLD.abort()


@pytest.mark.parametrize("aborted", [False, True])
def test_begin_anew_after_a_failure(aborted: bool) -> None:
    run_ranks(3, run_anew_after_a_failure, aborted)


def run_smaller(rank: int, world: int) -> None:
    with process_group(timeout=timedelta(seconds=100)):
        dist.barrier()
        if rank == world - 1:
            die()
        with pytest.raises(PeerLostError):
            dist.barrier()
    os.environ["WORLD_SIZE"] = str(world - 1)
    with process_group(timeout=timedelta(seconds=100)):
        reduce(rank, world - 1)
    say("went on")


def test_begin_anew_without_a_killed_rank() -> None:
    with start_ranks(4, run_smaller) as ranks:
        assert [rank.heard() for rank in ranks[:3]] == ["went on"] * 3


# ---- groups that cannot be made -----------------------------------------------------------------


def run_killed_before_new_group(rank: int, world: int, victim: int, first: int) -> None:
    with process_group():
        dist.barrier()
        if rank == victim:
            time.sleep(0.5)
            die()
        if rank != first:
            time.sleep(1)  # when the other has gone
        since = time.monotonic()
        with pytest.raises(PeerLostError, match=f"rank {victim} ended") as caught:
            dist.new_group(timeout=timedelta(seconds=60))
        assert caught.value.ranks == (victim,)
        say(time.monotonic() - since)


@pytest.mark.parametrize("victim", [0, 2])  # with rank 0 goes the store
def test_a_rank_that_is_killed_before_it_comes_to_new_group(victim: int) -> None:
    with start_ranks(3, run_killed_before_new_group, victim, 1) as ranks:
        assert all(ranks[rank].heard() < 30 for rank in range(3) if rank != victim)


def run_late(rank: int, world: int) -> None:
    """Who comes when the others have given up hears just that: they are alive."""
    with process_group():
        dist.barrier()
        if rank == 2:
            stay_away(2, world)
        with pytest.raises(SdpError) as caught:
            dist.new_group(timeout=timedelta(seconds=1))
        if rank != 2:
            gave_up()
        else:
            assert re.search(r"ranks 0, 1 \(pid .*\) gave up, or ended", str(caught.value))
        dist.barrier()


def test_a_rank_that_comes_to_new_group_too_late(rank_pool: Any) -> None:
    rank_pool(3).run(run_late)


def run_in_another_order(rank: int, world: int) -> None:
    with process_group():
        dist.barrier()
        with pytest.raises(RendezvousError, match=r"groups in the same order.*`sdp doctor`"):
            dist.new_group([0, 1] if rank == 0 else None, timeout=timedelta(seconds=10))
        dist.barrier()


def test_groups_in_another_order(rank_pool: Any) -> None:
    rank_pool(3).run(run_in_another_order)


def run_leave_before_rank_0(rank: int, world: int) -> None:
    """Who waits for rank 0 to leave has told it first that it leaves."""
    store_shutdown.FOLLOW_S = 60.0
    with process_group(timeout=timedelta(seconds=30)):
        dist.barrier()
        if rank == 0:
            with pytest.raises(PeerLostError, match="closed the group"):
                dist.barrier()


def test_a_rank_that_leaves_says_so_at_once() -> None:
    run_ranks(2, run_leave_before_rank_0)


def run_without_a_store(rank: int, world: int) -> None:
    """The store went with rank 0, which is no member of the new group."""
    dist.init_process_group("smddp")
    dist.barrier()
    if rank == 0:
        die()
    time.sleep(0.5)
    with pytest.raises(RendezvousError, match=r"group 1 \(ranks 1, 2\).*the store failed.*Hint"):
        dist.new_group([1, 2])
    say("told")


def test_new_group_when_the_store_has_gone() -> None:
    with start_ranks(3, run_without_a_store) as ranks:
        assert [ranks[rank].heard() for rank in (1, 2)] == ["told", "told"]
