"""Ranks that die, stop, leave or do not come: who is told what."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import CollectiveTimeoutError, FusionBuffer, Group, PeerLostError
from sdp_plugins.core.dtypes import DType
from sdp_plugins.core.errors import RendezvousTimeoutError
from tests.core.failing import NOTICE_S, PATHS, TIMEOUT_S, assert_failed, now, reduce_until_it_fails
from tests.faults import wait_for_go
from tests.ranks import Pool, Start, say, start_ranks

# A rank that gave up itself tells the others why, and is not the one to blame.
ENDED = r"( rank \d gave up: .*)?: rank 2 ended unexpectedly"


# ---- lost ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_killed_in_all_reduce(start_pooled: Start, path: str) -> None:
    with start_pooled(3, reduce_until_it_fails, path) as ranks:
        for rank in ranks:
            assert rank.heard() == "going"
        killed = now()
        ranks[2].kill()
        outcomes = [ranks[0].outcome(), ranks[1].outcome()]
    errors = assert_failed(
        outcomes, PeerLostError, ranks=(2,), op="all_reduce", text=ENDED, since=killed
    )
    for error in errors:
        assert error.seq > 10
        assert f"float32[{PATHS[path]}] sum" in str(error)
        assert f"(last completed: all_reduce #{error.seq - 1})" in str(error)


def compute(rank: int, world: int, victim: int) -> None:
    group = Group.from_env(timeout_s=TIMEOUT_S)
    group.barrier()
    say("going")
    if rank == victim:
        time.sleep(600)
    group.all_reduce(np.zeros(2**20, np.float32))


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_killed_in_compute(start_pooled: Start, victim: int) -> None:
    with start_pooled(3, compute, victim) as ranks:
        for rank in ranks:
            assert rank.heard() == "going"
            rank.until_asleep()
        killed = now()
        ranks[victim].kill()
        outcomes = [rank.outcome() for rank in ranks if rank.rank != victim]
    text = rf"( rank \d gave up: .*)?: rank {victim} ended unexpectedly"
    assert_failed(
        outcomes, PeerLostError, ranks=(victim,), op="all_reduce", text=text, since=killed
    )


def leave_early(rank: int, world: int, how: str) -> None:
    group = Group.from_env(timeout_s=TIMEOUT_S)
    group.barrier()
    if rank == 2:
        wait_for_go()
        if how == "close":
            group.close()
            time.sleep(600)
        if how == "raise":
            sys.excepthook(*_caught())
            sys.exit(1)
        if how == "forget":
            del group
            time.sleep(600)
        os._exit(0) if how == "os._exit" else sys.exit(0)
    group.all_reduce(np.zeros(10))


def _caught() -> Any:
    try:
        raise ValueError("a bug in the training script")
    except ValueError:
        return sys.exc_info()


@pytest.mark.parametrize("how", ["close", "raise", "sys.exit", "os._exit", "forget"])
def test_left_early(start_pooled: Start, how: str) -> None:
    with start_pooled(3, leave_early, how) as ranks:
        assert ranks[2].heard() == "waiting"
        for rank in ranks:
            rank.until_asleep()
        leaving = now()
        ranks[2].kill(signal.SIGUSR1)
        outcomes = [ranks[0].outcome(), ranks[1].outcome()]
    what = "(ended unexpectedly|has closed the group)"
    if how in ("close", "forget"):
        what = "has closed the group"
    assert_failed(
        outcomes,
        PeerLostError,
        ranks=(2,),
        op="all_reduce",
        text=f".*: rank 2 {what}",
        since=leaving,
    )


def fail_asynchronously(rank: int, world: int) -> dict[str, Any]:
    group = Group.from_env(timeout_s=TIMEOUT_S)
    group.barrier()
    if rank == 2:
        say("going")
        time.sleep(600)
    data = [np.zeros(n, np.float32) for n in (10, 2**20, 100)]
    works = [group.all_reduce(x, async_op=True) for x in data]
    works.append(group.recv(np.zeros(3), 2, async_op=True))
    works.append(group.recv(np.zeros(3), 1 - rank, async_op=True))  # whose sender lives
    fusion = FusionBuffer(group, [(1000, DType.float32)])
    fusion.ready(0, np.zeros(1000, np.float32))
    say("going")
    errors: list[BaseException | None] = []
    for work in works:
        with pytest.raises(PeerLostError):
            work.wait()
        assert work.is_completed()
        errors.append(work.exception())
    ended = now()
    for call in (
        fusion.finish,
        group.barrier,
        lambda: group.all_reduce(data[0]),
        lambda: group.all_reduce(data[0], async_op=True),
        lambda: group.send(np.zeros(3), 1 - rank),
        lambda: group.recv(np.zeros(3), 1 - rank),
        lambda: group.allocate(4096),
        lambda: group.new_group([0, 1]),
    ):
        with pytest.raises(PeerLostError) as caught:
            call()
        errors.append(caught.value)
    errors.append(group.failure)
    group.close()
    return {"errors": errors, "ended": ended}


def test_pending_works_fail_and_the_group_repeats_its_first_cause(start_pooled: Start) -> None:
    with start_pooled(3, fail_asynchronously) as ranks:
        for rank in ranks:
            assert rank.heard() == "going"
        killed = now()
        ranks[2].kill()
        results = [ranks[0].result(), ranks[1].result()]
    for result in results:
        assert result["ended"] - killed < NOTICE_S
        texts = {str(error) for error in result["errors"]}
        assert len(texts) == 1, texts
        assert all(error.ranks == (2,) for error in result["errors"])


def meet(rank: int, world: int, late: int) -> None:
    if rank == late:
        time.sleep(600)
    say("going")
    Group.from_env()


def test_killed_in_rendezvous(start_pooled: Start) -> None:
    with start_pooled(3, meet, 2) as ranks:
        for rank in (ranks[1], ranks[0]):
            assert rank.heard() == "going"
            rank.until_asleep()
        killed = now()
        ranks[1].kill()
        outcome = ranks[0].outcome()
    assert type(outcome.error) is PeerLostError, outcome
    assert outcome.error.ranks == (1,) and outcome.error.op == "rendezvous"
    assert outcome.ended_at - killed < NOTICE_S
    assert str(outcome.error).startswith("[rank 0/3] rendezvous: rank 1")


def test_never_at_the_rendezvous() -> None:
    with start_ranks(3, meet, 2, env={"SDP_TIMEOUT_S": "4"}) as ranks:
        errors = [ranks[rank].outcome().error for rank in (0, 1)]
    waited = []
    for error in errors:
        assert type(error) is RendezvousTimeoutError and error.ranks == (2,), error
        waited.append(error.elapsed_s)
    assert max(waited) > 2  # who came later had waited for less when the first gave up


# ---- ranks that do not come ---------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_stopped(start_pooled: Start, path: str) -> None:
    """SIGSTOP; when the rank goes on it is told too."""
    with start_pooled(3, reduce_until_it_fails, path, 1.5) as ranks:
        for rank in ranks:
            assert rank.heard() == "going"
        stopped = now()
        ranks[1].kill(signal.SIGSTOP)
        outcomes = [ranks[0].outcome(), ranks[2].outcome()]
        resumed = now()
        ranks[1].kill(signal.SIGCONT)
        last = ranks[1].outcome()
    what = r".*: rank 1 (did not arrive in|arrived, but stalled for) 1\.5 s"
    common: dict[str, Any] = {"ranks": (1,), "op": "all_reduce", "text": what}
    kind = CollectiveTimeoutError
    errors = assert_failed(outcomes, kind, **common, since=stopped, not_before_s=1.4)
    assert all(error.elapsed_s >= 1.5 for error in errors if "gave up" not in str(error))
    assert_failed([last], kind, **common, since=resumed)


def come_late(rank: int, world: int, late: int) -> None:
    # Rank 1 times out first; rank 0 need not wait for its own time-out.
    group = Group.from_env(timeout_s=TIMEOUT_S)
    group.broadcast(np.zeros(3, np.int16), 0)
    group.timeout_s = 1.0 if rank == 1 else TIMEOUT_S
    if rank == late:
        say("asleep")
        time.sleep(600)
    group.all_reduce(np.zeros(25, np.float64), "max")


def test_never_arrives(start_pooled: Start) -> None:
    with start_pooled(3, come_late, 2) as ranks:
        assert ranks[2].heard() == "asleep"
        asleep = now()
        outcomes = [ranks[0].outcome(), ranks[1].outcome()]
    told, first = assert_failed(
        outcomes,
        CollectiveTimeoutError,
        ranks=(2,),
        op="all_reduce",
        text=".*: rank 2 did not arrive in 1 s",
        since=asleep,
        not_before_s=0.9,
    )
    assert str(first) == (
        "[rank 1/3] all_reduce #2 float64[25] max: rank 2 did not arrive in 1 s; rank 2 last "
        "announced broadcast #1 int16[3] root 0 (last completed: broadcast #1). Hint: that rank is "
        "stopped, still computing, or took another path through the program; if it is only slow, "
        "raise the group's timeout (SDP_TIMEOUT_S, unless the program passes one)."
    )
    assert "rank 1 gave up: " in str(told) and str(told).count("last completed") == 1


def wait_per_call(rank: int, world: int) -> list[str]:
    """A call's own time-out, and the group's after it was set anew."""
    texts = []
    with Group.from_env(name="afterwards", timeout_s=TIMEOUT_S) as afterwards:
        for name, limits in (("call", {"timeout_s": 0.25}), ("group", {})):
            group = Group.from_env(name=name, timeout_s=TIMEOUT_S)
            group.timeout_s = 20 if limits else 0.5
            if rank == 0:
                with pytest.raises(CollectiveTimeoutError) as caught:
                    group.all_reduce(np.zeros(3), **limits)
                texts.append(str(caught.value))
            afterwards.barrier()
            group.close()
    return texts


def test_time_outs_of_a_call_and_a_group(rank_pool: Pool) -> None:
    (of_call, of_group), _ = rank_pool(2).run(wait_per_call)
    assert "rank 1 did not arrive in 0.25 s" in of_call
    assert "rank 1 did not arrive in 0.5 s" in of_group


def wait_shortly(rank: int, world: int) -> float:
    """A wait that ends before the operation leaves it as it is."""
    group = Group.from_env(timeout_s=TIMEOUT_S)
    afterwards = Group.from_env(name="afterwards", timeout_s=TIMEOUT_S)
    if rank == 1:
        afterwards.barrier()
    data = np.full(5, rank + 1.0)
    work = group.all_reduce(data, async_op=True)
    assert work is not None
    if rank == 0:
        start = now()
        with pytest.raises(CollectiveTimeoutError, match=r"all_reduce: not done after .* 0\.2 s"):
            work.wait(0.2)
        assert 0.2 <= now() - start < 0.2 + NOTICE_S and not work.is_completed()
        assert work.exception() is None
        afterwards.barrier()
    work.wait()
    afterwards.close()
    group.close()
    return float(data[0])


def test_a_wait_that_times_out_does_not_end_the_operation(rank_pool: Pool) -> None:
    assert rank_pool(2).run(wait_shortly) == [3.0, 3.0]
