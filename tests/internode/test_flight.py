"""The flight recorder of groups that span nodes: each node sees its own ranks, reports all."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sdp_plugins.core import CollectiveTimeoutError
from sdp_plugins.core.counters import Counters
from sdp_plugins.flight import report_file
from sdp_plugins.flight.rank_snapshot import RankSnapshot
from sdp_plugins.flight.wait_report import report
from tests.faults import gave_up, stay_away
from tests.flight.cases import LONG_S, job_of, seen_of, until_read, until_seen
from tests.internode.spanning import meet
from tests.ranks import Pool, Ranks, Start, say

TIME = r"\d+\.\d m?s"


def one_is_late(rank: int, world: int, root: str, late: int) -> None:
    with meet("1+2", root, "g", timeout_s=LONG_S) as group:
        data = np.ones(300_000, np.float32)
        group.all_reduce(data)
        if rank == late:
            time.sleep(LONG_S)
        group.all_reduce(data)


def count(rank: int, world: int, root: str) -> tuple[Counters, dict[int, Counters]]:
    """Own counters after ten all_reduces, and those of the node at the end."""
    with meet("1+2", root, "g", timeout_s=LONG_S) as group:
        for number in range(1, 11):
            if rank == 2:
                until_rank_1_waits_in(number)
                time.sleep(0.02)
            group.all_reduce(np.ones(300_000, np.float32))
        own = group.counters()[rank]
        for src, dst in ((0, 1), (1, 2)):  # between nodes, and within one
            if rank == src:
                group.send(np.ones(7), dst)
            elif rank == dst:
                group.recv(np.ones(7), src)
        group.barrier()  # now all have counted their messages
        return own, group.counters()


def until_rank_1_waits_in(number: int) -> None:
    waits = rf"rank(s 0,)? 1 ha(s|ve) waited {TIME} in all_reduce #{number} "
    until_read(partial(seen_of, os.environ["SDP_JOB_ID"]), waits)


def test_counters_are_those_of_the_node(rank_pool: Pool, tmp_path: Path) -> None:
    (_, alone), (early, first), (late, second) = rank_pool(3).run(count, str(tmp_path))
    for mine, messages in ((alone[0], 1), (first[1], 2), (second[2], 1), (first[2], 1)):
        assert (mine.messages, mine.message_nbytes) == (messages, 56 * messages)
    assert list(alone) == [0] and list(first) == list(second) == [1, 2]
    for counted in (alone[0], early, late):
        assert counted.nbytes == 12_000_000
        assert counted.busy_ns >= counted.waiting_ns
    assert (early.operations, late.operations, alone[0].operations) == (10, 10, 11)
    assert early.waiting_ns >= 2e8 and late.waiting_ns == 0  # ten pauses of 20 ms
    assert late.awaited_ns >= 2e8 and late.last_arrivals == 10
    assert alone[0].waiting_ns == 0  # for ranks of its node


def of_node(ranks: Ranks, node: int) -> list[RankSnapshot]:
    return [snapshot for snapshot in job_of(ranks).snapshots if snapshot.info.host == f"node{node}"]


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_of_another_node_is_late(start_pooled: Start, tmp_path: Path, late: int) -> None:
    with start_pooled(3, one_is_late, str(tmp_path), late) as ranks:
        others = "ranks 1, 2" if late == 0 else "ranks 0, 1"
        what = r"all_reduce #2 float32\[300000\] sum"
        waited = rf"{others} have waited {TIME} in {what} for rank {late}"

        last = r"all_reduce #1 float32\[300000\] sum"
        idle = rf"rank {late} .*is in no operation; its last: {last}, done"
        until_seen(ranks, waited, idle)  # here one machine is all nodes
        own = "\n".join(report(of_node(ranks, 1)))
        if late == 0:
            assert "and wait for rank 0 (not seen here)" in own
        else:
            assert "rank 1 has waited" in own and "for rank 2\n" in own
        for node in (0, 1):
            report_file.write(tmp_path / "flight", node, of_node(ranks, node))
        together = "\n".join(report(report_file.read([tmp_path / "flight"])))
        until_seen(ranks, waited, idle, read=lambda: together)


def queue_and_wait(rank: int, world: int, root: str) -> None:
    with meet("2x1", root, "g", timeout_s=LONG_S) as group:
        if rank == 0:
            works = [group.all_reduce(np.ones(10), async_op=True) for _ in range(3)]
            say("going")
            time.sleep(LONG_S)
            del works
        group.recv(np.ones(5), 0, 7)


def test_queued_operations_and_messages_between_nodes(start_pooled: Start, tmp_path: Path) -> None:
    with start_pooled(2, queue_and_wait, str(tmp_path)) as ranks:
        first = rf"rank 0 has waited {TIME} in all_reduce #1 float64\[10\] sum for rank 1"
        message = rf"rank 1 has waited {TIME} in recv #1 float64\[5\] from rank 0 tag 7"
        until_seen(ranks, first, message, "with 2 more queued behind it")


def many_steps(rank: int, world: int, root: str) -> None:
    with meet("1+2", root, "g", timeout_s=LONG_S) as group:
        for _ in range(100):
            group.all_reduce(np.ones(1000, np.float32))
        say("going")
        group.barrier()
        time.sleep(LONG_S)


def test_steps_are_apart_from_operations(start_pooled: Start, tmp_path: Path) -> None:
    with start_pooled(3, many_steps, str(tmp_path)) as ranks:
        for rank in ranks:
            assert rank.heard() == "going"
        for snapshot in job_of(ranks).snapshots:
            if snapshot.info.name == "g":
                assert [e.seq for e in snapshot.operations][:100] == list(range(1, 101))
                assert all(e.started >= e.issued and e.finished for e in snapshot.operations[:100])
                assert len(snapshot.steps) == 64


def fail(rank: int, world: int, root: str) -> str:
    with meet("1+2", root, "g", timeout_s=LONG_S) as group:
        group.barrier()
        group.timeout_s = 1  # not for the rendezvous, which a busy machine may delay
        if rank == 0:
            stay_away(2, world)
            return ""
        with pytest.raises(CollectiveTimeoutError) as caught:
            group.all_reduce(np.ones(10))
        gave_up()
        return "\n".join(getattr(caught.value, "__notes__", []))


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="errors have no notes before 3.11")
def test_an_error_across_nodes_says_who_waited(rank_pool: Pool, tmp_path: Path) -> None:
    for note in rank_pool(3).run(fail, str(tmp_path))[1:]:
        assert "group g (ranks 0-2, 2 of them seen here):\n" in note
        assert "ranks 1, 2 have been in all_reduce #2 float64[10] sum for" in note
        assert "and wait for rank 0 (not seen here)" in note
