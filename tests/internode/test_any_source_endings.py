"""However a receive from any rank across nodes ends without a message: who is told what."""

from __future__ import annotations

import re
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import numpy as np
import pytest

from sdp_plugins.core import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Group,
    PeerLostError,
    SdpError,
)
from sdp_plugins.core.internode.operation import SpanningOperation
from sdp_plugins.core.internode.receiver import Receiver
from tests.flight.cases import LONG_S, job_of, until_seen
from tests.internode.spanning import LAYOUTS, meet
from tests.ranks import Start, say

LIMIT_S = 2.0
"""The time-out of groups that must time out."""
TIME = r"\d+\.\d m?s"


def own_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("sdp")}


def exchange(group: Group, one: int, other: int) -> None:
    """A message in each direction between two ranks."""
    if group.rank not in (one, other):
        return
    peer = one + other - group.rank
    for _ in range(20):
        sent = group.send(np.full(1000, group.rank), peer, 9, async_op=True)
        received = np.zeros(1000, np.int64)
        group.recv(received, peer, 9)
        assert (received == peer).all()
        assert sent is not None
        sent.wait()


# ---- closing -------------------------------------------------------------------------------------


def close_while_it_waits(rank: int, world: int, root: str, served: bool) -> str:
    """Rank 0 leaves while receives wait, or an envelope that nobody wants; the others go on."""
    group = meet("3x1", root, "g")
    work: Any = None
    group.barrier()
    if rank == 0:
        work = group.recv(np.zeros(3), None, 1, async_op=True)
        if served:
            work.wait()
            assert work.source_rank == 1
        group.close()
        assert not own_threads()
        return str(work.exception() or "served")
    if rank == 1 and served:
        group.send(np.zeros(3), 0, 1)
    for _ in range(15):  # rank 1 waits while rank 0 leaves, and looks at what has become of it
        time.sleep(0.1 * (rank == 2))
        exchange(group, 1, 2)
    group.close()
    return "done"


@pytest.mark.parametrize("served", [True, False])
def test_a_group_is_closed_in_good_order(start_pooled: Start, tmp_path: Path, served: bool) -> None:
    with start_pooled(3, close_while_it_waits, str(tmp_path), served) as ranks:
        first, *others = ranks.results()
        assert "the group is closed" in first or first == "served"
        assert (first == "served") == served
        assert others == ["done", "done"]


def outlive(rank: int, world: int, layout: str, root: str) -> tuple[int, str] | None:
    """The others leave one by one; rank 0 is served as long as one is left."""
    group = meet(layout, root, "g", timeout_s=LONG_S)
    group.barrier()
    if rank > 1:
        group.close()
        return None
    if rank == 1:
        time.sleep(2)
        group.send(np.full(2, 5.0), 0)
        group.close()
        return None
    buffer = np.zeros(2)
    work = group.recv(buffer, None, timeout_s=20)
    assert (buffer == 5).all()
    with pytest.raises(PeerLostError) as caught:
        group.recv(buffer, None, timeout_s=20)
    group.close()
    return work.source_rank, str(caught.value)


@pytest.mark.parametrize("layout", ["3x1", "2x2", "interleaved", "1+2"])
def test_who_leaves_spoils_no_receive(start_pooled: Start, tmp_path: Path, layout: str) -> None:
    with start_pooled(len(LAYOUTS[layout]), outlive, layout, str(tmp_path)) as ranks:
        source, text = ranks.results()[0]
        assert source == 1
        assert re.search(r"recv #2 float64\[2\] from any rank tag 0: ", text), text
        assert "has closed the group" in text


# ---- failures ------------------------------------------------------------------------------------


def receive_in_vain(
    rank: int, world: int, layout: str, root: str, receivers: list[int], timeout_s: float
) -> None:
    group = meet(layout, root, "g")
    group.barrier()
    group.timeout_s = timeout_s
    say("going")
    try:
        if rank in receivers:
            group.recv(np.zeros(3), None, 4)
        else:
            time.sleep(LONG_S)
    finally:
        group.close()
        assert not own_threads()


@pytest.mark.parametrize(
    ("layout", "victim"), [("2x2", 1), ("2x2", 3), ("3x1", 2), ("interleaved", 1)]
)
def test_a_killed_rank(start_pooled: Start, tmp_path: Path, layout: str, victim: int) -> None:
    world = len(LAYOUTS[layout])
    receivers = [rank for rank in range(world) if rank != victim]
    arguments = (layout, str(tmp_path), receivers, LONG_S)
    with start_pooled(world, receive_in_vain, *arguments) as ranks:
        assert [rank.heard() for rank in ranks] == ["going"] * world
        ranks[victim].kill(signal.SIGKILL)
        for rank in receivers:
            error = ranks[rank].outcome().error
            assert type(error) is PeerLostError, error
            assert error.ranks == (victim,), error


@pytest.mark.parametrize(("layout", "silent"), [("2x2", "rank 1 on node0, ranks 2, 3 on node1")])
def test_nobody_answers(start_pooled: Start, tmp_path: Path, layout: str, silent: str) -> None:
    """A stopped rank is one that could have sent, as are those that only do not."""
    with start_pooled(4, receive_in_vain, layout, str(tmp_path), [0], LIMIT_S) as ranks:
        assert [rank.heard() for rank in ranks] == ["going"] * 4
        ranks[3].kill(signal.SIGSTOP)
        error = ranks[0].outcome().error
        assert type(error) is CollectiveTimeoutError, error
        assert error.ranks == (1, 2, 3)
        head = r"\[rank 0 in group g \(ranks 0-3\)\]"
        what = rf"{head} recv #1 float64\[3\] from any rank tag 4: none of {silent}"
        assert re.match(rf"{what} answered in {LIMIT_S:g} s", str(error)), error


def nobody_is_left_to_tell(rank: int, world: int, root: str) -> str:
    """Where the other node has left, a rank of this node that is silent is named in time."""
    group = meet("1+2", root, "g", timeout_s=LONG_S)
    group.barrier()
    if rank == 0:
        group.close()
    if rank != 1:
        time.sleep(LONG_S)
        return ""
    with pytest.raises(CollectiveTimeoutError) as caught:
        group.recv(np.zeros(1), None, timeout_s=LIMIT_S)
    group.close()
    return str(caught.value)


def test_the_other_nodes_have_left(start_pooled: Start, tmp_path: Path) -> None:
    with start_pooled(3, nobody_is_left_to_tell, str(tmp_path)) as ranks:
        assert "from any rank tag 0: rank 2 did not answer in 2 s" in ranks[1].result()


def send_another_size(rank: int, world: int, layout: str, root: str, sender: int) -> None:
    with meet(layout, root, "g") as group:
        if rank == sender:
            group.send(np.zeros(4, np.float32), 0)
        if rank == 0:
            group.recv(np.zeros(3, np.float32), None)
        group.barrier()


@pytest.mark.parametrize("sender", [1, 3])
def test_a_message_of_another_size(start_pooled: Start, tmp_path: Path, sender: int) -> None:
    with start_pooled(4, send_another_size, "2x2", str(tmp_path), sender) as ranks:
        for rank in ranks:
            error = rank.outcome().error
            assert type(error) is CollectiveMismatchError, error
            assert error.ranks == (sender,)
            assert re.search(rf"rank {sender}( on node1)? sends float32\[4\]", str(error))
            if rank.rank == 0:
                assert "recv #1 float32[3] from any rank tag 0: " in str(error)


def fail_within_a_node(rank: int, world: int, root: str, late: bool) -> None:
    """Rank 1 hears of it, and stays; the other node is told all the same."""
    group = meet("1+2", root, "g", timeout_s=LONG_S)
    group.barrier()
    loop = Receiver._loop

    def start(receiver: Receiver) -> None:
        time.sleep(0.5 * late)
        loop(receiver)

    with mock.patch.object(Receiver, "_loop", start):
        if rank == 2:
            time.sleep(0.2)  # the receive waits
            group.send(np.zeros(4), 1)
        else:
            with pytest.raises(CollectiveMismatchError) as caught:
                group.recv(np.zeros(3), None if rank else 1)
            say(str(caught.value))
        time.sleep(2 * LONG_S)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_failure_within_a_node_is_told(start_pooled: Start, tmp_path: Path, late: bool) -> None:
    """Before, or after, threads wait for messages of other nodes."""
    with start_pooled(3, fail_within_a_node, str(tmp_path), late) as ranks:
        for rank in (0, 1):
            assert "rank 2 sends float64[4]" in ranks[rank].heard()


def give_up(rank: int, world: int, root: str, seen: bool) -> None:
    with meet("2x2", root, "g") as group:
        group.barrier()
        if rank == 3:
            raise KeyError("no such column")
        check = SpanningOperation.check if seen else Mock()
        with mock.patch.object(SpanningOperation, "check", check):
            group.recv(np.zeros(3), None)


@pytest.mark.parametrize("seen", [True, False], ids=["before it leaves", "as it leaves"])
def test_an_exception_is_told(start_pooled: Start, tmp_path: Path, seen: bool) -> None:
    with start_pooled(4, give_up, str(tmp_path), seen) as ranks:
        for rank in (0, 1, 2):
            error = ranks[rank].outcome().error
            assert isinstance(error, SdpError)
            assert "no such column" in str(error)
        assert isinstance(ranks[3].outcome().error, KeyError)


# ---- what is recorded ----------------------------------------------------------------------------


def wait_and_tell(rank: int, world: int, root: str) -> None:
    with meet("2x2", root, "g", timeout_s=LONG_S) as group:
        if rank in (1, 3):
            group.send(np.zeros(5), 0, rank)
        if rank == 0:
            for tag in (1, 3, 7):
                group.recv(np.zeros(5), None, tag)
        time.sleep(LONG_S)


def test_the_flight_recorder_shows_it(start_pooled: Start, tmp_path: Path) -> None:
    with start_pooled(4, wait_and_tell, str(tmp_path)) as ranks:
        waiting = rf"rank 0 has waited {TIME} in recv #3 float64\[5\] from any rank tag 7"
        until_seen(ranks, waiting)
        (snapshot,) = (snapshot for snapshot in job_of(ranks).snapshots if snapshot.info.rank == 0)
        assert [(event.seq, event.peer) for event in snapshot.messages] == [(1, 1), (2, 3), (3, -1)]
