"""What ranks do in the tests of the flight recorder, and what is to be seen of it from outside."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from sdp_plugins.core import Group, SdpError
from sdp_plugins.flight.jobs import Job, find_jobs, match_jobs
from sdp_plugins.flight.segments import read_segments
from sdp_plugins.flight.wait_report import report
from tests.core.rendezvous_cases import FileStore
from tests.ranks import HANG_S, Ranks, say

LONG_S = HANG_S  # a look from outside starts a process, which may take a minute


def job_of(ranks: Ranks) -> Job:
    """The ranks' job, as another process finds it."""
    (job,) = match_jobs(find_jobs(read_segments().snapshots), ranks.environment["SDP_JOB_ID"])
    return job


def until_seen(ranks: Ranks, *parts: str, read: Callable[[], str] | None = None) -> str:
    """The report of the ranks' job, as soon as it has all these patterns.

    Args:
        ranks: Of the job.
        parts: Regular expressions.
        read: How to get it, if not by a look from outside.
    """
    return until_read(read or partial(seen, ranks), *parts)


def until_read(read: Callable[[], str], *parts: str) -> str:
    """What is read, as soon as it has all these patterns."""
    end = time.monotonic() + HANG_S
    while True:
        text = read()
        if all(re.search(part, text) for part in parts):
            return text
        assert time.monotonic() < end, f"{parts} not in\n{text}"
        time.sleep(0.05)


def seen(ranks: Ranks) -> str:
    """The report now; empty as long as there is no job."""
    return seen_of(ranks.environment["SDP_JOB_ID"])


def seen_of(job: str) -> str:
    """The report of this job, which may be the caller's own."""
    found = match_jobs(find_jobs(read_segments().snapshots), job)
    return "\n".join(report(found[0].snapshots)) if found else ""


def one_is_late(rank: int, world: int, how: str) -> None:
    """The last rank does not come to the second operation."""
    with Group.from_env(name="flown", timeout_s=LONG_S) as group:
        data = np.ones(100, np.float32)
        group.broadcast(data, 0)
        say("going")
        if rank == world - 1:
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(LONG_S)
        group.all_reduce(data)


def one_stops_within(rank: int, world: int) -> None:
    """All ranks come to many large operations; the test stops one of them."""
    with Group.from_env(name="flown", timeout_s=LONG_S) as group:
        data = np.ones(2**20, np.float32)
        while True:
            group.all_reduce(data)
            say("going")


def queue_many(rank: int, world: int) -> None:
    """Rank 0 has issued three operations, the others none."""
    with Group.from_env(name="flown", timeout_s=LONG_S) as group:
        works = [group.all_reduce(np.ones(10), async_op=True) for _ in range(3 * (rank == 0))]
        say("going")
        time.sleep(LONG_S)
        del works


def receive_in_vain(rank: int, world: int) -> None:
    """Rank 0 receives from rank 1, which waits for rank 0 in a barrier."""
    with Group.from_env(name="flown", timeout_s=LONG_S) as group:
        if rank == 0:
            group.recv(np.ones(7), 1, 3)
        group.barrier()


def wait_in_two_groups(rank: int, world: int) -> None:
    """Rank 0 waits for rank 2 in the whole group, rank 2 for rank 1 in a part of it."""
    with Group.from_env(name="flown", timeout_s=LONG_S) as group:
        part = group.new_group([2, 1], name="part")
        if rank == 0:
            group.barrier()
        if rank == 2:
            assert part is not None
            part.broadcast(np.ones(5), 1)
        say("going")
        time.sleep(LONG_S)


def make_another_group(
    rank: int, world: int, folder: Path, members: list[int], late: list[int]
) -> list[str]:
    """The `late` ranks are in an operation of the first group while the others make a second.

    Returns:
        What the second group's operation's error says of the first, on the late ranks.
    """
    with Group.from_env(name="flown", timeout_s=LONG_S) as group:
        group.barrier()
        try:
            if rank in late:
                group.barrier()
            elif rank in members:
                place = members.index(rank), len(members)
                Group.from_store(FileStore(folder), *place, name="late", timeout_s=LONG_S)
            say("going")
            time.sleep(LONG_S)
        except SdpError as error:
            return list(getattr(error, "__notes__", []))
    return []


def alone(rank: int, world: int) -> None:
    """A group of one."""
    with Group.from_env(name="flown", timeout_s=LONG_S) as group:
        group.all_reduce(np.ones(3))
        say("going")
        time.sleep(LONG_S)
