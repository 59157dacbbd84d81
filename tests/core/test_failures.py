"""Ranks that die, stop, leave, disagree or are interrupted: who is told what, and how soon."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    FusionBuffer,
    Group,
    PeerLostError,
    ReduceOp,
    SdpError,
)
from sdp_plugins.core.dtypes import DType
from sdp_plugins.core.errors import RendezvousTimeoutError
from tests.core.failing import (
    NOTICE_S,
    PATHS,
    assert_failed,
    now,
    reduce_until_it_fails,
)
from tests.core.rendezvous_cases import wait_for_go
from tests.leaks import no_leaks
from tests.ranks import RankPool, Start, say, start_ranks

Pool = Callable[[int], RankPool]

# A rank that gave up itself tells the others why, and is not the one to blame.
ENDED = r"( rank \d gave up: .*)?: rank 2 ended while needed"


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
    group = Group.from_env(timeout_s=30)
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
    text = rf"( rank \d gave up: .*)?: rank {victim} ended while needed"
    assert_failed(
        outcomes, PeerLostError, ranks=(victim,), op="all_reduce", text=text, since=killed
    )


def leave_early(rank: int, world: int, how: str) -> None:
    group = Group.from_env(timeout_s=30)
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
    what = "(ended while needed|has closed the group)"
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
    group = Group.from_env(timeout_s=30)
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
    with start_ranks(3, meet, 2, env={"SDP_TIMEOUT_S": "1"}) as ranks:
        outcomes = [ranks[0].outcome(), ranks[1].outcome()]
    for outcome in outcomes:
        assert type(outcome.error) is RendezvousTimeoutError, outcome
        assert outcome.error.ranks == (2,) and outcome.error.elapsed_s > 0.5


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
        ranks[1].kill(signal.SIGCONT)
        resumed = now()
        last = ranks[1].outcome()
    what = r".*: rank 1 (did not arrive in|arrived, but stalled for) 1\.5 s"
    common: dict[str, Any] = {"ranks": (1,), "op": "all_reduce", "text": what}
    kind = CollectiveTimeoutError
    errors = assert_failed(outcomes, kind, **common, since=stopped, not_before_s=1.4)
    assert all(error.elapsed_s >= 1.5 for error in errors if "gave up" not in str(error))
    assert_failed([last], kind, **common, since=resumed)


def come_late(rank: int, world: int, late: int) -> None:
    # Rank 1 times out first; rank 0 need not wait for its own time-out.
    group = Group.from_env(timeout_s=30)
    group.broadcast(np.zeros(3, np.int16), 0)
    group.timeout_s = 1.0 if rank == 1 else 30.0
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
    with Group.from_env(name="afterwards", timeout_s=30) as afterwards:
        for name, limits in (("call", {"timeout_s": 0.25}), ("group", {})):
            group = Group.from_env(name=name, timeout_s=30)
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
    group = Group.from_env(timeout_s=30)
    afterwards = Group.from_env(name="afterwards", timeout_s=30)
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


# ---- ranks that disagree ------------------------------------------------------------------------


def f32(count: int) -> np.ndarray[Any, Any]:
    return np.ones(count, np.float32)


Call = Callable[[Group, np.ndarray[Any, Any]], object]
BIG = 2**18

# What all ranks but the last call, what that one calls, and how both are announced.
MISMATCHES: dict[str, tuple[Call, str, Call, str]] = {
    "operation": (
        lambda g, x: g.all_reduce(x),
        "all_reduce #2 float32[BIG] sum",
        lambda g, x: g.broadcast(x, 0),
        "broadcast #2 float32[BIG] root 0",
    ),
    "barrier": (
        lambda g, x: g.all_reduce(x),
        "all_reduce #2 float32[BIG] sum",
        lambda g, x: g.barrier(),
        "barrier #2",
    ),
    "dtype": (
        lambda g, x: g.all_reduce(x),
        "all_reduce #2 float32[BIG] sum",
        lambda g, x: g.all_reduce(x.view(np.int32)),
        "all_reduce #2 int32[BIG] sum",
    ),
    "count": (
        lambda g, x: g.all_reduce(x),
        "all_reduce #2 float32[BIG] sum",
        lambda g, x: g.all_reduce(x[:-1]),
        "all_reduce #2 float32[LESS] sum",
    ),
    "count on two paths": (
        lambda g, x: g.all_reduce(x),
        "all_reduce #2 float32[BIG] sum",
        lambda g, x: g.all_reduce(x[:5]),
        "all_reduce #2 float32[5] sum",
    ),
    "reduction": (
        lambda g, x: g.all_reduce(x),
        "all_reduce #2 float32[BIG] sum",
        lambda g, x: g.all_reduce(x, "max"),
        "all_reduce #2 float32[BIG] max",
    ),
    "premul_sum": (
        lambda g, x: g.all_reduce(x),
        "all_reduce #2 float32[BIG] sum",
        lambda g, x: g.all_reduce(x, ReduceOp.premul_sum(2)),
        "all_reduce #2 float32[BIG] premul_sum",
    ),
    "root": (
        lambda g, x: g.broadcast(x, 0),
        "broadcast #2 float32[BIG] root 0",
        lambda g, x: g.broadcast(x, 1),
        "broadcast #2 float32[BIG] root 1",
    ),
    "count of a broadcast": (
        lambda g, x: g.broadcast(x, 0),
        "broadcast #2 float32[BIG] root 0",
        lambda g, x: g.broadcast(x[:-1], 0),
        "broadcast #2 float32[LESS] root 0",
    ),
    "root of a reduce": (
        lambda g, x: g.reduce(x, 0),
        "reduce #2 float32[BIG] sum root 0",
        lambda g, x: g.reduce(x, 1),
        "reduce #2 float32[BIG] sum root 1",
    ),
    "reduce_scatter": (
        lambda g, x: g.reduce_scatter(x, f32(3 * len(x))),
        "reduce_scatter #2 float32[BIG] sum",
        lambda g, x: g.reduce_scatter(x[:-1], f32(3 * len(x) - 3)),
        "reduce_scatter #2 float32[LESS] sum",
    ),
}
SIZES = {"inline": 1000, "staged": BIG, "zero-copy": BIG}


def disagree(rank: int, world: int, case: str, path: str) -> tuple[BaseException, bool]:
    """The error, and whether the buffer is as it was."""
    usual, _, other, _ = MISMATCHES[case]
    with Group.from_env(timeout_s=30) as group:
        data = f32(SIZES[path])
        if path == "zero-copy":
            data = np.frombuffer(group.allocate(data.nbytes), np.float32)
        data[:] = np.arange(len(data)) + rank
        before = data.copy()
        group.barrier()
        with pytest.raises(CollectiveMismatchError) as caught:
            (other if rank == world - 1 else usual)(group, data)
        unchanged = np.array_equal(data, before)
        with pytest.raises(CollectiveMismatchError) as again:
            group.barrier()
        assert str(again.value) == str(caught.value)
        return caught.value, unchanged


@pytest.mark.parametrize("path", SIZES)
@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatch(rank_pool: Pool, case: str, path: str) -> None:
    size = SIZES[path]
    _, usual, _, other = MISMATCHES[case]
    usual, other = (
        text.replace("BIG", str(size)).replace("LESS", str(size - 1)) for text in (usual, other)
    )
    for rank, (error, unchanged) in enumerate(rank_pool(3).run(disagree, case, path)):
        called = other if rank == 2 else usual
        assert str(error) == (
            f"[rank {rank}/3] {called}: ranks disagree: ranks 0, 1: {usual}; rank 2: {other} "
            "(last completed: barrier #1). Hint: all ranks must call the same operations in the "
            "same order, with the same types and sizes, and fusion buffers of the same tensors."
        )
        assert isinstance(error, SdpError) and unchanged
        assert (error.ranks, error.op, error.seq) == ((2,), called.split(" ")[0], 2)


def uneven(lengths: list[list[int]]) -> Callable[[Group, Any], object]:
    """Rank r offers lengths[r][r] and expects lengths[r][s] of rank s."""

    def call(group: Group, x: Any) -> object:
        mine = lengths[group.rank]
        group.received = [x(n) for n in mine]  # type: ignore[attr-defined]
        return group.all_gather_uneven(group.received, x(mine[group.rank]))  # type: ignore[attr-defined]

    return call


def gather_to_1(group: Group, x: Any) -> object:
    group.received = [x(5), x(6), x(7)]  # type: ignore[attr-defined]
    outputs = group.received if group.rank == 1 else None  # type: ignore[attr-defined]
    return group.gather(outputs, x(4 + 2 * group.rank), 1)


def scatter_from_0(group: Group, x: Any) -> object:
    group.received = [x(5 + group.rank % 2)]  # type: ignore[attr-defined]
    inputs = [x(5), x(6), x(7)] if group.rank == 0 else None
    return group.scatter(group.received[0], inputs, 0)  # type: ignore[attr-defined]


def all_to_all_badly(group: Group, x: Any) -> object:
    unit = len(x(1))
    expected = [2, 2, 2] if group.rank < 2 else [2, 3, 2]
    group.received = [x(sum(expected))]  # type: ignore[attr-defined]
    return group.all_to_all(
        group.received[0],  # type: ignore[attr-defined]
        x(6),
        [n * unit for n in expected],
        [2 * unit] * 3,
    )


# What each rank offers must be what the taker expects; else all are told, all of it.
OFFERS: dict[str, tuple[Callable[[Group, Any], object], str]] = {
    "all_gather": (
        lambda g, x: uneven([[5] * 3, [5] * 3, [6] * 3])(g, x),
        "rank 0 expects 5 elements of rank 2, which offers 6; "
        "rank 1 expects 5 elements of rank 2, which offers 6; "
        "rank 2 expects 6 elements of rank 0, which offers 5; "
        "rank 2 expects 6 elements of rank 1, which offers 5",
    ),
    "all_gather, one taker errs": (
        lambda g, x: uneven([[5, 6, 7], [5, 6, 8], [5, 6, 7]])(g, x),
        "rank 1 expects 8 elements of rank 2, which offers 7",
    ),
    "gather": (
        gather_to_1,
        "rank 1 expects 5 elements of rank 0, which offers 4; "
        "rank 1 expects 7 elements of rank 2, which offers 8",
    ),
    "scatter": (
        scatter_from_0,
        "rank 2 expects 5 elements of rank 0, which offers 7",
    ),
    "all_to_all": (
        all_to_all_badly,
        "rank 2 expects 3 elements of rank 1, which offers 2",
    ),
}


def offer_badly(rank: int, world: int, case: str, unit: int) -> tuple[BaseException, bool]:
    with Group.from_env(timeout_s=30) as group:
        group.barrier()

        def x(count: int) -> Any:
            return np.full(count * unit, 7, np.float32)

        with pytest.raises(CollectiveMismatchError) as caught:
            OFFERS[case][0](group, x)
        received = group.received  # type: ignore[attr-defined]
        return caught.value, all(bool((part == 7).all()) for part in received)


@pytest.mark.parametrize("unit", [1, 30_000])
@pytest.mark.parametrize("case", OFFERS)
def test_mismatch_of_pieces(rank_pool: Pool, case: str, unit: int) -> None:
    what = re.sub(r"\b\d+(?= elements)", lambda m: str(int(m[0]) * unit), OFFERS[case][1])
    what = re.sub(r"(?<=offers )\d+", lambda m: str(int(m[0]) * unit), what)
    for rank, (error, unchanged) in enumerate(rank_pool(3).run(offer_badly, case, unit)):
        assert str(error).startswith(f"[rank {rank}/3] "), str(error)
        assert f": {what} (last completed: barrier #1). Hint: " in str(error), str(error)
        assert isinstance(error, SdpError) and error.seq == 2 and unchanged


# ---- aborts -------------------------------------------------------------------------------------


def abort(rank: int, world: int, culprit: int) -> tuple[float, BaseException]:
    """One rank aborts, one waits in an all_reduce, one is busy elsewhere."""
    group = Group.from_env(timeout_s=30)
    group.barrier()
    busy = (culprit + 1) % world
    if rank == culprit:
        time.sleep(0.1)
        group.abort("the loss is not a number")
        aborted = now()
        with pytest.raises(PeerLostError) as caught:
            group.barrier()
        assert str(caught.value) == f"[rank {rank}/{world}] the loss is not a number"
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
        assert error.ranks == (culprit,) and error.op == "all_reduce"
    waiting = (culprit + 2) % 3
    assert results[waiting][0] - aborted < NOTICE_S


LIKE_A_FAILURE = "[rank 7/9] x gave up: y (last completed: z #1). Hint: look for w"


def abort_in_words_of_a_failure(rank: int, world: int) -> SdpError:
    with Group.from_env(timeout_s=30) as group:
        group.barrier()
        if rank == 0:
            group.abort(LIKE_A_FAILURE)
        with pytest.raises(PeerLostError) as caught:
            group.all_reduce(np.zeros(3))
        return caught.value


def test_an_abort_comes_through_whole(rank_pool: Pool) -> None:
    own, told = rank_pool(2).run(abort_in_words_of_a_failure)
    title = "all_reduce #2 float64[3] sum"
    assert str(own) == f"[rank 0/2] {LIKE_A_FAILURE}"
    assert str(told).startswith(f"[rank 1/2] {title}: rank 0 gave up: {LIKE_A_FAILURE} (last ")
    assert str(told).count("Hint: ") == 1
    for error in (own, told):
        assert (error.kind, error.cause, error.ranks) == ("aborted", LIKE_A_FAILURE, (0,))
        assert (error.origin_rank, error.global_origin_rank, error.is_repeat) == (0, 0, True)


def read_the_fields(rank: int, world: int) -> list[SdpError]:
    """Rank 2 does not come; then all look again."""
    errors = []
    with Group.from_env(name="afterwards", timeout_s=30) as afterwards:
        group = Group.from_env(timeout_s=30)
        for _ in range(2 if rank < 2 else 0):
            with pytest.raises(CollectiveTimeoutError) as caught:
                group.all_reduce(np.zeros(3), timeout_s=0.3 if rank == 0 else 30)
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
    """Neither `failure` nor `repr` explains it, which may write a report; raising it does."""
    group = Group.from_env(timeout_s=30)
    group.abort("enough")
    explained: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EXPLAINS, lambda *_: explained.append(1))
        assert "failed" in repr(group) and "enough" in str(group.failure)
        assert not explained
        with pytest.raises(PeerLostError, match="enough"):
            group.barrier()
        assert explained
    group.close()


EXPLAINS = "sdp_plugins.core.open_groups.OpenGroups.group_failed"


def test_looking_at_a_failure_has_no_side_effects(rank_pool: Pool) -> None:
    rank_pool(1).run(look_at_a_failure)


def abort_receiver(rank: int, world: int) -> float:
    """Whoever aborts has its own receives ended, and the peers' too."""
    group = Group.from_env(timeout_s=30)
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
    group = Group.from_env(timeout_s=30)
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
        Group.from_env(timeout_s=30)
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
    with Group.from_env(timeout_s=30) as group:
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


# ---- what is left -------------------------------------------------------------------------------


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
    with start_ranks(3, reduce_until_it_fails, "zero-copy") as ranks:
        for rank in ranks:
            assert rank.heard() == "going"
        for rank in ranks:
            rank.kill()
    assert not [name for name in os.listdir("/dev/shm") if "sdp" in name]


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
