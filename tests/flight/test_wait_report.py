"""The flight recorder, read from outside: who waits for whom when a job hangs."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from sdp_plugins.core import CollectiveMismatchError, Group, PeerLostError
from sdp_plugins.flight.jobs import find_jobs, match_jobs
from sdp_plugins.flight.segments import read_segments
from tests.core.test_fork import in_child
from tests.faults import gave_up, stay_away
from tests.flight.cases import (
    LONG_S,
    alone,
    job_of,
    make_another_group,
    one_is_late,
    one_stops_within,
    queue_many,
    receive_in_vain,
    seen,
    seen_of,
    until_seen,
    wait_in_two_groups,
)
from tests.ranks import HANG_S, Pool, Start, say

TIME = r"\d+\.\d m?s"
WAITED = rf"ranks 0, 1 have waited {TIME} in all_reduce #2 float32\[100\] sum for rank 2\n"
LAST = rf"broadcast #1 float32\[100\] root 0, done {TIME} ago"


def test_an_absent_rank(start_pooled: Start) -> None:
    with start_pooled(3, one_is_late, "absent") as ranks:
        head = rf"group flown \(ranks 0-2\):\n  {WAITED}"
        line = rf"rank 2 \(pid {ranks[2].pid} on .*\) is in no operation; its last: {LAST}"
        until_seen(ranks, head, line)


def test_a_stopped_rank(start_pooled: Start) -> None:
    with start_pooled(3, one_is_late, "stopped") as ranks:
        what = "is stopped (by a signal or a debugger) and is in no operation; its last:"
        until_seen(ranks, WAITED, what.replace("(", r"\(").replace(")", r"\)"))


def test_a_rank_that_is_stopped_in_an_operation(start_pooled: Start) -> None:
    with start_pooled(3, one_stops_within) as ranks:
        assert ranks[1].heard() == "going"
        ranks[1].kill(signal.SIGSTOP)
        # Wherever it has been stopped: before, in or after an operation.
        until_seen(ranks, r"ranks 0, 2 have .* rank 1\b", r"rank 1 \(pid \d+ on .*\) is stopped")


def stay_after_a_loss(rank: int, world: int) -> None:
    group = Group.from_env(name="flown", timeout_s=LONG_S)
    group.broadcast(np.ones(100, np.float32), 0)
    say("going")
    if rank == 2:
        time.sleep(LONG_S)
    with pytest.raises(PeerLostError) as caught:
        group.all_reduce(np.ones(100, np.float32))
    say(getattr(caught.value, "__notes__", []))
    time.sleep(LONG_S)


def test_a_killed_rank_is_seen_through_the_others(start_pooled: Start) -> None:
    with start_pooled(3, stay_after_a_loss) as ranks:
        for rank in ranks:
            assert rank.heard() == "going"
        until_seen(ranks, WAITED)
        ranks[2].kill()
        what = rf"rank 2 \(pid {ranks[2].pid} on .*\) has ended; it was in no operation; .* {LAST}"
        failed = r"failed on ranks? [01]\b.*: all_reduce #2 float32\[100\] sum: rank 2 ended"
        until_seen(ranks, WAITED, what, failed)
        ranks[0].kill()  # one is enough to see the others
        until_seen(ranks, WAITED, what, r"\(ranks 0-2\)")


def test_operations_that_wait_behind_others(start_pooled: Start) -> None:
    with start_pooled(2, queue_many) as ranks:
        until_seen(
            ranks, rf"rank 0 has waited {TIME} in all_reduce #1 float64\[10\] sum for rank 1"
        )
        (mine,) = (snapshot for snapshot in job_of(ranks).snapshots if snapshot.info.rank == 0)
        assert [event.seq for event in mine.operations] == [1, 2, 3]
        assert [bool(event.started) for event in mine.operations] == [True, False, False]


def test_a_receive_without_a_send(start_pooled: Start) -> None:
    with start_pooled(2, receive_in_vain) as ranks:
        message = rf"rank 0 has waited {TIME} in recv #1 float64\[7\] from rank 1 tag 3\n"
        barrier = rf"rank 1 has waited {TIME} in barrier #1 for rank 0\n"
        his = rf"rank 0 \(pid \d+ on .*\) has waited {TIME} in recv #1"
        hers = rf"rank 1 \(pid \d+ on .*\) has been in barrier #1 for {TIME}"
        until_seen(ranks, message, barrier, his, hers)


def test_a_rank_that_waits_in_another_group(start_pooled: Start) -> None:
    with start_pooled(3, wait_in_two_groups) as ranks:
        whole = rf"rank 0 has waited {TIME} in barrier #\d+ for ranks 1, 2\n"
        there = rf"rank 2 .* has been in broadcast #1 float64\[5\] root 1 for {TIME} in group part;"
        part = r"group part \(ranks 1, 2\):"
        waits = rf"rank 2 has waited {TIME} in broadcast #1 float64\[5\] root 1 for rank 1\n"
        until_seen(ranks, whole, there, part, waits)


def test_a_rank_that_does_not_come_to_make_a_group(start_pooled: Start, tmp_path: Path) -> None:
    with start_pooled(3, make_another_group, tmp_path, [0, 1, 2], [1]) as ranks:
        head = rf"group late, which is being made \(3 ranks\):\n  ranks 0, 2 have waited {TIME} for"
        late = rf" rank 1\n    rank 1 \(pid \d+ on .*\) has been in barrier #2 for {TIME}\n"
        other = rf"rank 1 has waited {TIME} in barrier #2 for ranks 0, 2\n"
        theirs = rf"rank 2 \(pid .*\) has waited {TIME} for the others to make group late"
        text = until_seen(ranks, head + late, other, theirs)
        assert text.startswith("group late")
        os.kill(ranks[0].pid, signal.SIGUSR1)
        until_seen(ranks, head + late, read=ranks[0].output)
        ranks[0].kill()
        if hasattr(Exception, "add_note"):
            (note,) = ranks[1].result()
            assert re.search(theirs, note)


def test_a_part_of_a_group_that_is_being_made(start_pooled: Start, tmp_path: Path) -> None:
    with start_pooled(3, make_another_group, tmp_path, [0, 1], []) as ranks:
        assert ranks[0].heard() == "going"
        assert "being made" not in seen(ranks)
    second = tmp_path / "second"
    second.mkdir()
    with start_pooled(3, make_another_group, second, [0, 1], [1]) as ranks:
        until_seen(ranks, rf"made \(2 ranks\):\n  rank 0 has waited {TIME} for 1 more\n")


def test_a_group_of_one(start_pooled: Start) -> None:
    with start_pooled(1, alone) as ranks:
        assert ranks[0].heard() == "going"
        until_seen(ranks, rf"\(rank 0\):\n  nobody waits; its last: all_reduce #1 .* {TIME} ago")


def leave(rank: int, world: int) -> None:
    with Group.from_env(name="flown", timeout_s=LONG_S) as group:
        group.barrier()
    say("closed")
    time.sleep(LONG_S)
    del group


def test_a_closed_group_is_not_shown(start_pooled: Start) -> None:
    with start_pooled(2, leave) as ranks:
        for rank in ranks:
            assert rank.heard() == "closed"
        assert "flown" not in seen(ranks)


def until_both_wait() -> None:
    end = time.monotonic() + HANG_S
    while "ranks 0, 1 have waited" not in (text := seen_of(os.environ["SDP_JOB_ID"])):
        assert time.monotonic() < end, text
        time.sleep(0.01)


def disagree(rank: int, world: int) -> str:
    with Group.from_env(name="flown", timeout_s=LONG_S) as group:
        group.barrier()
        if rank == 2:
            until_both_wait()
        with pytest.raises(CollectiveMismatchError) as caught:
            group.all_reduce(np.ones(10 + (rank == 2), np.float32))
        with pytest.raises(CollectiveMismatchError) as again:
            group.barrier()
        notes = getattr(caught.value, "__notes__", [])
        assert notes[0] is getattr(again.value, "__notes__", [])[0]  # made once
        return "\n".join(notes)


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="errors have no notes before 3.11")
def test_an_error_says_who_waited_for_whom(rank_pool: Pool, start_pooled: Start) -> None:
    for note in rank_pool(3).run(disagree):
        assert note.startswith("Flight recorder (ranks of this node):\ngroup flown (ranks 0-2):")
        assert "ranks 0, 1 called all_reduce #2 float32[10] sum" in note
        assert "rank 2 called all_reduce #2 float32[11] sum" in note
    with start_pooled(3, stay_after_a_loss) as ranks:
        for rank in ranks:
            assert rank.heard() == "going"
        until_seen(ranks, WAITED)
        ranks[2].kill()
        for rank in ranks[0], ranks[1]:
            (note,) = rank.heard()
            assert "in all_reduce #2 float32[100] sum for rank 2\n" in note
            assert (
                f"rank 2 (pid {ranks[2].pid} on " in note and "has ended; it was in no op" in note
            )


def be_late_and_go_on(rank: int, world: int) -> list[str]:
    group = Group.from_env(name="flown", timeout_s=LONG_S)
    group.barrier()
    group.timeout_s = 1  # not for the rendezvous, which a busy machine may delay
    if rank == 1:
        stay_away(1, world)
    try:
        group.all_reduce(np.ones(10))  # which the late rank may still finish
        group.barrier()
    except Exception as error:
        if rank == 0:
            gave_up()
        return list(getattr(error, "__notes__", [""]))
    raise AssertionError("nobody has failed")


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="errors have no notes before 3.11")
def test_what_ranks_do_after_the_failure_is_not_told(rank_pool: Pool) -> None:
    notes = rank_pool(2).run(be_late_and_go_on)
    for (note,) in notes:
        assert re.search(rf"rank 0 has waited {TIME} in all_reduce #2 .* for rank 1\n", note)
        assert "rank 1" in note and "is in no operation; its last: barrier #1" in note


def test_two_jobs_are_told_apart(start_pooled: Start, rank_pool: Pool) -> None:
    with start_pooled(2, queue_many) as ranks:
        until_seen(ranks, "for rank 1")
        here = [
            snapshot.info.pid
            for snapshot in job_of(ranks).snapshots
            if snapshot.info.name == "flown"
        ]
        assert sorted(here) == sorted(rank.pid for rank in ranks)
        assert re.search(r": ranks 0, 1 of `\S*python\S* .*rank_child.py.*`, ", job_of(ranks).title)
        found = find_jobs(read_segments().snapshots)
        for word in (str(ranks[0].pid), ranks.environment["SDP_JOB_ID"][:10]):
            assert [job.keys for job in match_jobs(found, word)] == [job_of(ranks).keys]
        assert not match_jobs(found, "no such job")


def look_as(uid: int) -> None:
    try:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        os._exit(
            len(read_segments().snapshots)
        )  # not as a script: as another user it can clean nothing up
    finally:
        os._exit(77)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_jobs_are_not_seen(start_pooled: Start) -> None:
    with start_pooled(2, queue_many) as ranks:
        until_seen(ranks, "for rank 1")
        assert in_child(lambda: look_as(65534)) == 0
