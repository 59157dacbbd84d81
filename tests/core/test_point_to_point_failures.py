"""Messages that fail: mismatches, lost peers, time-outs, closed groups."""

from __future__ import annotations

import re
import signal
import time
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Group,
    PeerLostError,
    SdpError,
)
from tests.core.failing import NOTICE_S, assert_failed, lose, now
from tests.core.test_point_to_point import LARGE, wait
from tests.core.values import Array
from tests.faults import gave_up, stay_away
from tests.ranks import Pool, say, start_ranks

# ---- what goes wrong ----------------------------------------------------------------------------

# What rank 0 sends where rank 1 expects float32[1000], and how the message calls it.
UNEXPECTED = {
    "longer": (np.zeros(1001, np.float32), r"float32\[1001\]"),
    "shorter": (np.zeros(0, np.float32), r"float32\[0\]"),
    "much longer": (np.zeros(LARGE, np.float32), r"float32\[1048576\]"),
    "another type": (np.zeros(1000, np.int32), r"int32\[1000\]"),
}


def exchange_unexpected(group: Group, case: str, late: bool, got: Array) -> None:
    if group.rank == 0:
        group.send(UNEXPECTED[case][0], 1)
        group.recv(got, 1)  # a small message was complete before it was looked at
    if late:  # it is set aside, behind a receive for another
        group.recv(got, 0, tag=1, async_op=True)
        time.sleep(0.2)
    group.recv(got, 0)


def send_unexpected(rank: int, world: int, case: str, late: bool) -> tuple[BaseException, bool]:
    """The error, and whether the receiver's buffer is as it was."""
    with Group.from_env(timeout_s=30) as group:
        got = np.full(1000, 7, np.float32)
        with pytest.raises(CollectiveMismatchError) as caught:
            exchange_unexpected(group, case, late, got)
        with pytest.raises(CollectiveMismatchError):
            group.barrier()
        return caught.value, bool((got == 7).all())


@pytest.mark.parametrize("late", [False, True], ids=["posted", "late"])
@pytest.mark.parametrize("case", UNEXPECTED)
def test_mismatch(rank_pool: Pool, case: str, late: bool) -> None:
    told, found = rank_pool(2).run(send_unexpected, case, late)
    what = (
        rf"recv #{1 + late} float32\[1000\] from rank 0 tag 0: rank 0 sends {UNEXPECTED[case][1]}"
    )
    for error, unchanged in (told, found):
        assert unchanged and isinstance(error, SdpError) and error.ranks == (0,)
    head = r"\[rank 0/2\] .*: rank 1 gave up: "
    hint = r"\. Hint: a receive needs the type .*"
    assert re.fullmatch(rf"\[rank 1/2\] {what}{hint}", str(found[0])), str(found[0])
    assert re.fullmatch(rf"{head}{what}{hint}", str(told[0])), str(told[0])


def wait_for_lost(rank: int, world: int, what: str, timeout_s: float) -> None:
    group = Group.from_env(timeout_s=timeout_s)
    group.barrier()
    say("going")
    if rank == 1:
        time.sleep(600)
    if what == "recv":
        group.recv(np.zeros(3), 1)
    elif what == "recv from any":
        group.recv(np.zeros(3), None)
    elif what == "send":
        group.send(np.zeros(LARGE), 1)


LOST = {
    "recv": (r"recv #1 float64\[3\] from rank 1 tag 0", "recv"),
    "recv from any": (r"recv #1 float64\[3\] from any rank tag 0", "recv"),
    "send": (r"send #1 float64\[1048576\] to rank 1 tag 0", "send"),
}


@pytest.mark.parametrize("what", LOST)
def test_killed_peer(what: str) -> None:
    with start_ranks(3, wait_for_lost, what, 30.0) as ranks:
        outcomes = lose(ranks, 1, lambda: (time.sleep(0.2), ranks[1].kill()))
        assert_failed(
            outcomes,
            PeerLostError,
            ranks=(1,),
            op=LOST[what][1],
            text="( rank \\d gave up: .*)?: rank 1 ended unexpectedly",
            since=now() - NOTICE_S,
        )
        assert all(" #1 float64[" in str(outcome.error) for outcome in outcomes)


@pytest.mark.parametrize("what", LOST)
def test_stopped_peer(what: str) -> None:
    with start_ranks(2, wait_for_lost, what, 1.0) as ranks:
        outcomes = lose(ranks, 1, lambda: ranks[1].kill(signal.SIGSTOP))
        (error,) = assert_failed(
            outcomes,
            CollectiveTimeoutError,
            ranks=(1,),
            op=LOST[what][1],
            text=": rank 1 did not answer in 1 s",
            since=now() - NOTICE_S,
        )
        assert error.elapsed_s >= 1


def leave_after_sending(rank: int, world: int, size: int) -> float:
    """What was sent before its sender closed, or died, still arrives."""
    group = Group.from_env(timeout_s=30)
    if rank == 1:
        group.send(np.full(size, 9.0), 0)
        group.close()
        return 9.0
    time.sleep(0.3)
    got = np.zeros(size)
    group.recv(got, 1)
    with pytest.raises(PeerLostError, match="rank 1 has closed the group"):
        group.recv(got, 1)
    group.close()
    return float(got[-1])


@pytest.mark.parametrize("size", [1, 30_000])
def test_sender_may_leave_at_once(rank_pool: Pool, size: int) -> None:
    assert rank_pool(2).run(leave_after_sending, size) == [9.0, 9.0]


def close_with_pending(rank: int, world: int) -> None:
    group = Group.from_env(timeout_s=30)
    group.barrier()
    # Each sends to the next, which waits for the one after: from there it would set messages aside.
    following = (rank + 1) % world
    received = group.recv(np.zeros(3), following, async_op=True)
    sent = group.send(np.zeros(LARGE), following, tag=1, async_op=True)
    assert received.source_rank == -1 and not received.is_completed()
    group.barrier()  # or a rank that is early would close before the other sends
    start = now()
    group.close()
    assert now() - start < NOTICE_S
    for work in (received, sent):
        with pytest.raises(SdpError, match=r"the group is closed|rank . has closed the group"):
            wait(work)


def test_closing_fails_what_is_pending(rank_pool: Pool) -> None:
    rank_pool(3).run(close_with_pending)


def time_out_shortly(rank: int, world: int) -> Any:
    """The time-out of one call; a wait's own time-out leaves the operation as it is."""
    with Group.from_env(timeout_s=30) as group:
        if rank == 1:
            group.recv(np.zeros(1), 0, tag=1)
            group.send(np.ones(1), 0)
            stay_away(1, world)
            return None
        got = np.zeros(1)
        work = group.recv(got, 1, async_op=True)
        with pytest.raises(CollectiveTimeoutError, match=r"recv: not done after a wait of 0\.2 s"):
            work.wait(0.2)
        group.send(np.zeros(1), 1, tag=1)
        work.wait()
        assert got[0] == 1
        with pytest.raises(CollectiveTimeoutError, match=r"rank 1 did not answer in 0\.5 s"):
            group.recv(got, 1, timeout_s=0.5)
        gave_up()


def test_time_out_of_one_call(rank_pool: Pool) -> None:
    rank_pool(2).run(time_out_shortly)
