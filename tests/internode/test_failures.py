"""Ranks of other nodes that die, stop, give up or call something else: who is told what."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from sdp_plugins.core import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    SdpError,
)
from sdp_plugins.core.internode.operation import SpanningOperation
from sdp_plugins.core.internode.plan import Algorithm, Plan
from sdp_plugins.core.internode.sharded_reduction import SegmentReduction
from tests.internode.spanning import LAYOUTS, TIMEOUT_S, meet, only
from tests.ranks import Outcome, Ranks, Start, say

LIMIT_S = 2.0
"""The time-out of groups that must time out."""


def reduce_until_it_fails(
    rank: int, world: int, layout: str, root: str, timeout_s: float = TIMEOUT_S
) -> None:
    with meet(layout, root, "g") as group:
        data = np.zeros(500_000, np.float32)
        group.all_reduce(data)
        group.timeout_s = timeout_s
        say("going")
        while True:
            group.all_reduce(data)


def outcomes(ranks: Ranks, but: int) -> list[Outcome]:
    return [rank.outcome() for rank in ranks if rank.rank != but]


def check(found: list[Outcome], kind: type[SdpError], blamed: tuple[int, ...], text: str) -> None:
    for outcome in found:
        error = outcome.error
        assert type(error) is kind, error
        assert error.ranks == blamed, error
        assert re.search(text, str(error)), error
        assert re.match(r"\[rank \d in group g \(ranks [-\d, ]+\)\] \w+ #\d+ ", str(error)), error
        assert "Hint: " in str(error)


@pytest.mark.parametrize(("layout", "victim"), [("2x2", 1), ("3x1", 1), ("2x1", 0)])
def test_a_killed_rank(start_pooled: Start, tmp_path: Path, layout: str, victim: int) -> None:
    with start_pooled(len(LAYOUTS[layout]), reduce_until_it_fails, layout, str(tmp_path)) as ranks:
        assert [rank.heard() for rank in ranks] == ["going"] * len(LAYOUTS[layout])
        ranks[victim].kill(signal.SIGKILL)
        found = outcomes(ranks, victim)
        check(found, PeerLostError, (victim,), f"rank {victim} (on node. )?(ended|cannot be reach)")


@pytest.mark.parametrize(("layout", "victim"), [("2x2", 3), ("3x1", 1)])
def test_a_stopped_rank(start_pooled: Start, tmp_path: Path, layout: str, victim: int) -> None:
    world, arguments = len(LAYOUTS[layout]), (layout, str(tmp_path), LIMIT_S)
    with start_pooled(world, reduce_until_it_fails, *arguments) as ranks:
        assert [rank.heard() for rank in ranks] == ["going"] * world
        ranks[victim].kill(signal.SIGSTOP)
        found = outcomes(ranks, victim)
        text = rf"rank {victim} (on node. )?(did not a|arrived, but stalled)"
        check(found, CollectiveTimeoutError, (victim,), text)


def stall_at_the_end(rank: int, world: int, layout: str, root: str, victim: int) -> None:
    """One rank never takes its operation's last step on its node; the other nodes go on."""
    with meet(layout, root, "g") as group:
        data = np.zeros(500_000, np.float32)
        group.all_reduce(data)
        group.timeout_s = LIMIT_S
        stalls = mock.Mock(side_effect=lambda: time.sleep(TIMEOUT_S))
        stalling = mock.patch.object(SegmentReduction, "_gather_node", stalls)
        with (
            only(Plan(Algorithm.sharded, (2,), 2**20)),
            stalling if rank == victim else nullcontext(),
        ):
            while True:
                group.all_reduce(data)


def test_who_waits_for_another_node_is_not_to_blame(start_pooled: Start, tmp_path: Path) -> None:
    """Rank 1 waits for rank 0, rank 0 for rank 2, and that for rank 3."""
    with start_pooled(4, stall_at_the_end, "2x2", str(tmp_path), 3) as ranks:
        check(outcomes(ranks, 3), CollectiveTimeoutError, (3,), "rank 3 .*(did not a|but stalled)")


def reduce_much_until_it_fails(rank: int, world: int, layout: str, root: str) -> None:
    with meet(layout, root, "g") as group:
        data = np.zeros(2**24, np.float32)
        plan = Plan(Algorithm.sharded, (len(set(LAYOUTS[layout])),), 64 * 2**20)
        with only(plan):
            group.all_reduce(data)
            group.timeout_s = 5 * LIMIT_S  # each moves 64 MiB, on a busy machine, too
            say("going")
            while True:
                group.all_reduce(data)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("layout", "victim"), [("2x1", 1), ("3x1", 2)])
def test_a_rank_goes_in_the_midst_of_a_message(
    start_pooled: Start, tmp_path: Path, layout: str, victim: int, number: signal.Signals
) -> None:
    """gloo never wakes who waits for a message of which a part has come."""
    world = len(LAYOUTS[layout])
    with start_pooled(world, reduce_much_until_it_fails, layout, str(tmp_path)) as ranks:
        assert [rank.heard() for rank in ranks] == ["going"] * world
        time.sleep(0.03)
        ranks[victim].kill(number)
        for outcome in outcomes(ranks, victim):
            assert isinstance(outcome.error, (PeerLostError, CollectiveTimeoutError)), outcome
            assert outcome.error.ranks == (victim,), outcome


def stop_between_headers(rank: int, world: int, layout: str, root: str) -> None:
    """Rank 1 tells rank 2 what it calls, and never rank 0."""
    with meet(layout, root, "g") as group:
        data = np.zeros(500_000, np.float32)
        group.all_reduce(data)
        group.timeout_s = LIMIT_S
        send = SpanningOperation.send

        def stop(operation: SpanningOperation, peer: int, *args: Any) -> Any:
            if peer == 0:
                time.sleep(0.3)  # what was sent before arrives
                os.kill(os.getpid(), signal.SIGSTOP)
            return send(operation, peer, *args)

        with mock.patch.object(SpanningOperation, "send", stop) if rank == 1 else nullcontext():
            group.all_reduce(data)


def test_who_waits_for_data_leaves_it_to_others_to_say_why(
    start_pooled: Start, tmp_path: Path
) -> None:
    """Rank 2 waits for data of rank 0, which waits to hear what rank 1 calls."""
    with start_pooled(3, stop_between_headers, "3x1", str(tmp_path)) as ranks:
        check(outcomes(ranks, 1), CollectiveTimeoutError, (1,), "rank 1 on node. did not a")


def give_up(rank: int, world: int, layout: str, root: str, what: str, victim: int) -> None:
    """Everyone all_reduces, but one."""
    with meet(layout, root, "g") as group:
        data = np.zeros(500_000, np.float32)
        group.all_reduce(data)
        calls: dict[str, Callable[[], Any]] = {
            "broadcast": lambda: group.broadcast(data, 0),
            "size": lambda: group.all_reduce(data[:-1]),
            "type": lambda: group.all_reduce(data.view(np.int32)),
            "operator": lambda: group.all_reduce(data, "max"),
            "small": lambda: group.all_reduce(data[:10]),
        }
        if rank != victim:
            group.all_reduce(data)
        elif what == "raise":
            raise KeyError("the data set is empty")
        elif what in calls:
            calls[what]()
        group.barrier()


@pytest.mark.parametrize("what", ["broadcast", "size", "type", "operator", "small"])
@pytest.mark.parametrize(("layout", "victim"), [("2x2", 3), ("3x1", 1)])
def test_another_call(
    start_pooled: Start, tmp_path: Path, layout: str, victim: int, what: str
) -> None:
    arguments = (layout, str(tmp_path), what, victim)
    with start_pooled(len(LAYOUTS[layout]), give_up, *arguments) as ranks:
        found = [rank.outcome() for rank in ranks]
        for outcome in found:
            assert type(outcome.error) is CollectiveMismatchError, outcome.error
            assert "ranks disagree: " in str(outcome.error)
            called = "broadcast" if what == "broadcast" else "all_reduce"
            assert f"rank {victim}" in str(outcome.error)
            assert f"{called} #2 " in str(outcome.error)


@pytest.mark.parametrize(("layout", "victim"), [("2x2", 1), ("3x1", 2)])
def test_an_exception_is_told_on_all_nodes(
    start_pooled: Start, tmp_path: Path, layout: str, victim: int
) -> None:
    arguments = (layout, str(tmp_path), "raise", victim)
    with start_pooled(len(LAYOUTS[layout]), give_up, *arguments) as ranks:
        found = outcomes(ranks, victim)
        text = f"rank {victim} (on node. )?gave up: KeyError: 'the data set is empty'"
        check(found, PeerLostError, (victim,), text)


def disagree_on_sizes(rank: int, world: int, layout: str, root: str) -> None:
    with meet(layout, root, "g") as group:
        outputs = [np.zeros(7 if r == 3 and rank == 0 else 5) for r in range(world)]
        group.all_gather_uneven(outputs, np.zeros(5))


def test_sizes_that_do_not_fit(start_pooled: Start, tmp_path: Path) -> None:
    with start_pooled(4, disagree_on_sizes, "4x1", str(tmp_path)) as ranks:
        text = "rank 0 expects 7 elements of rank 3, which offers 5"
        for outcome in (rank.outcome() for rank in ranks):
            if outcome.error is not None:  # who has all that it needs may be done before
                assert isinstance(outcome.error, SdpError)
                assert text in str(outcome.error) or "rank 0" in str(outcome.error)
        assert type(ranks[0].outcome().error) is CollectiveMismatchError


def receive_too_little(rank: int, world: int, layout: str, root: str) -> None:
    with meet(layout, root, "g") as group:
        if rank == 0:
            group.send(np.zeros(4, np.float32), 1)
            group.barrier()
        else:
            group.recv(np.zeros(3, np.float32), 0)


def test_a_message_of_another_size(start_pooled: Start, tmp_path: Path) -> None:
    with start_pooled(2, receive_too_little, "2x1", str(tmp_path)) as ranks:
        check(
            [ranks[1].outcome(), ranks[0].outcome()],
            CollectiveMismatchError,
            (0,),
            r"recv #1 float32\[3\] from rank 0 tag 0: rank 0 on node0 sends float32\[4\]",
        )


def call_wrongly(rank: int, world: int, layout: str, root: str) -> None:
    with meet(layout, root, "g") as group:
        with pytest.raises(ValueError, match="source -1 is not another rank"):
            group.recv(np.zeros(3), -1)
        with pytest.raises(ValueError, match="time-out must be positive"):
            group.recv(np.zeros(3), None, timeout_s=0)
        with pytest.raises(ValueError, match="not another rank"):
            group.send(np.zeros(3), rank)
        with pytest.raises(ValueError, match="root 9"):
            group.broadcast(np.zeros(3), 9)
        data = np.ones(3)
        group.all_reduce(data)  # it goes on
        assert (data == world).all()


def test_wrong_calls_leave_the_group_alone(start_pooled: Start, tmp_path: Path) -> None:
    with start_pooled(2, call_wrongly, "2x1", str(tmp_path)) as ranks:
        ranks.results()
