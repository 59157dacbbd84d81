"""Groups that a rank gives up, or whose rank is interrupted."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from sdp_plugins.core import CollectiveTimeoutError, FusionBuffer, Group, PeerLostError, SdpError
from sdp_plugins.core.dtypes import DType
from tests.core.failing import NOTICE_S, TIMEOUT_S, now
from tests.faults import wait_for_go
from tests.ranks import Pool, Start, say, start_ranks


def abort(rank: int, world: int, culprit: int) -> tuple[float, BaseException]:
    """One rank aborts, one waits in an all_reduce, one is busy elsewhere."""
    group = Group.from_env(timeout_s=TIMEOUT_S)
    group.barrier()
    busy = (culprit + 1) % world
    if rank == culprit:
        time.sleep(0.1)
        group.abort("the loss is not a number")
        aborted = now()
        with pytest.raises(PeerLostError) as caught:
            group.barrier()
        said = "abort: the loss is not a number. Hint: make a new group."
        assert str(caught.value) == f"[rank {rank}/{world}] {said}"
        return aborted, caught.value
    if rank == busy:
        time.sleep(0.4)
    with pytest.raises(PeerLostError) as caught:
        group.all_reduce(np.zeros(2**20))
    return now(), caught.value


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_abort(rank_pool: Pool, culprit: int) -> None:
    results = rank_pool(3).run(abort, culprit)
    aborted, own = results[culprit]
    assert "the loss is not a number" in str(own) and own.ranks == (culprit,)
    for rank in {0, 1, 2} - {culprit}:
        error = results[rank][1]
        assert f"rank {culprit} gave up: the loss is not a number" in str(error)
        assert str(error).endswith(" Hint: read the output of the rank that aborted.")
        assert error.ranks == (culprit,) and error.op == "all_reduce"
    waiting = (culprit + 2) % 3
    assert results[waiting][0] - aborted < NOTICE_S


LIKE_A_FAILURE = "[rank 7/9] x gave up: y (last completed: z #1). Hint: look for w"


def abort_in_words_of_a_failure(rank: int, world: int) -> SdpError:
    with Group.from_env(timeout_s=TIMEOUT_S) as group:
        group.barrier()
        if rank == 0:
            group.abort(LIKE_A_FAILURE)
        with pytest.raises(PeerLostError) as caught:
            group.all_reduce(np.zeros(3))
        return caught.value


def test_an_abort_comes_through_whole(rank_pool: Pool) -> None:
    own, told = rank_pool(2).run(abort_in_words_of_a_failure)
    title = "all_reduce #2 float64[3] sum"
    assert str(own) == f"[rank 0/2] abort: {LIKE_A_FAILURE}. Hint: make a new group."
    assert str(told).startswith(f"[rank 1/2] {title}: rank 0 gave up: {LIKE_A_FAILURE} (last ")
    assert str(told).endswith(" Hint: read the output of the rank that aborted.")
    for error in (own, told):
        assert (error.kind, error.cause, error.ranks) == ("aborted", LIKE_A_FAILURE, (0,))
        assert (error.origin_rank, error.global_origin_rank, error.is_repeat) == (0, 0, True)


def read_the_fields(rank: int, world: int) -> list[SdpError]:
    """Rank 2 does not come; then all look again."""
    errors = []
    with Group.from_env(name="afterwards", timeout_s=TIMEOUT_S) as afterwards:
        group = Group.from_env(timeout_s=TIMEOUT_S)
        for _ in range(2 if rank < 2 else 0):
            with pytest.raises(CollectiveTimeoutError) as caught:
                group.all_reduce(np.zeros(3), timeout_s=0.3 if rank == 0 else TIMEOUT_S)
            errors.append(caught.value)
        afterwards.barrier()
        group.close()
    return errors


def test_who_has_met_a_cause_and_who_repeats_it(rank_pool: Pool) -> None:
    first, second, _ = rank_pool(3).run(read_the_fields)
    assert [error.is_repeat for error in first] == [False, True]
    assert [error.is_repeat for error in second] == [True, True]
    for error in (*first, *second):
        assert (error.kind, error.origin_rank, error.ranks) == ("timeout", 0, (2,))
        assert error.cause.startswith("rank 2 did not arrive in 0.3 s")
        assert error.global_ranks == (2,) and error.summary in str(error)


def look_at_a_failure(rank: int, world: int) -> None:
    """Only raising it explains it, which may write a report."""
    group = Group.from_env(timeout_s=TIMEOUT_S)
    work = group.recv(np.zeros(3), 1 - rank, async_op=True) if world > 1 else None
    group.abort("enough")
    while work and not work.is_completed():
        time.sleep(0.01)
    explained: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EXPLAINS, lambda *_: explained.append(1))
        assert "failed" in repr(group) and "enough" in str(group.failure)
        assert work is None or "enough" in str(work.exception())
        assert not explained
        with pytest.raises(PeerLostError, match="enough"):
            group.barrier()
        assert explained
    group.close()


EXPLAINS = "sdp_plugins.core.open_groups.OpenGroups.group_failed"


def test_looking_at_a_failure_has_no_side_effects(rank_pool: Pool) -> None:
    rank_pool(2).run(look_at_a_failure)


def abort_receiver(rank: int, world: int) -> float:
    """Whoever aborts has its own receives ended, and the peers' too."""
    group = Group.from_env(timeout_s=TIMEOUT_S)
    work = group.recv(np.zeros(3), 1 - rank, async_op=True)
    group.barrier()
    start = now()
    if rank == 0:
        group.abort("enough")
    with pytest.raises(PeerLostError, match="enough"):
        work.wait()
    return now() - start


def test_abort_ends_point_to_point(rank_pool: Pool) -> None:
    assert max(rank_pool(2).run(abort_receiver)) < NOTICE_S


# ---- Ctrl-C -------------------------------------------------------------------------------------


def wait_blocking(group: Group) -> None:
    group.all_reduce(np.zeros(2**20, np.float32))


def wait_inline(group: Group) -> None:
    group.all_reduce(np.zeros(3, np.float32))


def wait_queued(group: Group) -> None:
    """Behind an asynchronous operation, so in the engine's thread."""
    group.all_reduce(np.zeros(3), async_op=True)
    group.all_reduce(np.zeros(3))


def wait_work(group: Group) -> None:
    work = group.all_reduce(np.zeros(3), async_op=True)
    assert work is not None
    work.wait()


def wait_recv(group: Group) -> None:
    group.recv(np.zeros(3), 1 - group.rank)


def wait_barrier(group: Group) -> None:
    group.barrier()


def wait_fusion(group: Group) -> None:
    fusion = FusionBuffer(group, [(1000, DType.float32)])
    fusion.ready(0, np.zeros(1000, np.float32))
    fusion.finish()


WAITS = {
    f.__name__: f
    for f in (
        wait_inline,
        wait_blocking,
        wait_queued,
        wait_work,
        wait_recv,
        wait_barrier,
        wait_fusion,
    )
}


# A blocking call that is given up leaves the group unusable; a wait for a handle does not.
ENDING = ("wait_inline", "wait_blocking", "wait_queued", "wait_barrier")


def call_again_and_again(wait: Callable[[Group], None], group: Group) -> None:
    """The interrupted rank had arrived at the first operation, which may thus still succeed."""
    for _ in range(3):
        wait(group)


def be_interrupted(rank: int, world: int, wait: str) -> tuple[float, float]:
    """When the interrupt came out, and when the group was closed after it."""
    group = Group.from_env(timeout_s=TIMEOUT_S)
    group.barrier()
    if rank == 1:
        wait_for_go()
        with pytest.raises(PeerLostError):
            call_again_and_again(WAITS[wait], group)
        group.close()
        return 0, 0
    try:
        say("going")
        WAITS[wait](group)
    except KeyboardInterrupt:
        ended = now()
        say("interrupted")
    if wait in ENDING:
        with pytest.raises(SdpError, match=r"\[rank 0/2\] .*: interrupted by a signal\. Hint: "):
            group.barrier()
    group.close()
    return ended, now()


@pytest.mark.parametrize("wait", WAITS)
def test_interrupt(wait: str) -> None:
    with start_ranks(2, be_interrupted, wait) as ranks:
        assert [rank.heard() for rank in ranks] == ["going", "waiting"]
        ranks[0].until_asleep()
        interrupted = now()
        ranks[0].kill(signal.SIGINT)
        assert ranks[0].heard() == "interrupted"
        ranks[1].kill(signal.SIGUSR1)
        (ended, closed), _ = ranks.results()
        ranks.finish()
    assert ended - interrupted < NOTICE_S
    assert closed - ended < NOTICE_S


def be_interrupted_at_rendezvous(rank: int, world: int) -> float:
    if rank == 1:
        time.sleep(600)
    try:
        say("going")
        Group.from_env(timeout_s=TIMEOUT_S)
    except KeyboardInterrupt:
        return now()
    return 0


def test_interrupt_at_rendezvous(start_pooled: Start) -> None:
    with start_pooled(2, be_interrupted_at_rendezvous) as ranks:
        assert ranks[0].heard() == "going"
        ranks[0].until_asleep()
        interrupted = now()
        ranks[0].kill(signal.SIGINT)
        assert ranks[0].result() - interrupted < NOTICE_S


def handle_signals(rank: int, world: int) -> None:
    """Signals that a program handles itself do not disturb a wait."""
    before = signal.signal(signal.SIGUSR2, lambda number, frame: say("handled"))
    with Group.from_env(timeout_s=TIMEOUT_S) as group:
        group.barrier()
        say("going") if rank == 0 else wait_for_go()
        data = np.ones(3)
        group.all_reduce(data)
        assert data.tolist() == [2, 2, 2]
    signal.signal(signal.SIGUSR2, before)


def test_handled_signal(start_pooled: Start) -> None:
    with start_pooled(2, handle_signals) as ranks:
        assert [rank.heard() for rank in ranks] == ["going", "waiting"]
        for _ in range(3):
            ranks[0].until_asleep()
            ranks[0].kill(signal.SIGUSR2)
            assert ranks[0].heard() == "handled"
        ranks[1].kill(signal.SIGUSR1)
        ranks.results()
