"""What the ranks of this launcher's job wait for, according to the flight recorder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sdp_plugins.flight.jobs import Job

# Functions import the flight recorder, because jobs start without it.

LONG_NS = 5 * 10**9
"""Shorter waits are normal."""


class Waiting(NamedTuple):
    """One rank's longest wait.

    Attributes:
        text: The ranks that it waits for, and the operation.
        for_s: Duration in seconds.
    """

    text: str
    for_s: float


def who_waits() -> str:
    """Which ranks on this machine wait for which others."""
    from sdp_plugins.flight.wait_report import report

    mine = own_jobs()
    if not mine:
        return "no rank on this machine has an open group"
    lines = [line for job in mine for line in (job.title, *report(job.snapshots))]
    return "\n".join(["the ranks on this machine at the moment:", *lines])


def long_waits() -> dict[int, Waiting]:
    """The ranks on this machine that have waited for long, by their number in the job."""
    from sdp_plugins.flight.wait_report import groups_of
    from sdp_plugins.flight.waits import waits

    found: dict[int, Waiting] = {}
    for job in own_jobs():
        for group in groups_of(job.snapshots).values():
            for wait in waits(group):
                for rank in wait.ranks:
                    info = group[rank].snapshot.info
                    whom = f" for {info.names.list(wait.targets)}" if wait.targets else ""
                    one = Waiting(f"waits{whom} in {wait.what}", wait.since_ns / 1e9)
                    if wait.since_ns >= LONG_NS:
                        longer = [found.get(info.global_rank, one), one]
                        found[info.global_rank] = max(longer, key=lambda each: each.for_s)
    return found


def own_jobs() -> list[Job]:
    """The jobs of which this process is the launcher."""
    from sdp_plugins.flight.jobs import find_jobs, jobs_of_process
    from sdp_plugins.flight.segments import read_segments

    return jobs_of_process(find_jobs(read_segments().snapshots), os.getpid())
