"""Reads the ranks of one job again and again, until it ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sdp_plugins.core.process_identity import process_state
from sdp_plugins.flight.jobs import Job, find_jobs
from sdp_plugins.flight.rank_snapshot import RankSnapshot, latest
from sdp_plugins.flight.segments import read_processes, read_segments

SEARCH_S = 5.0
"""How often other processes are searched for ranks that have joined: that takes longer."""

CLOSED_S = 5.0
"""A job whose processes have had no group for this long has ended, as far as can be seen."""


class JobWatch:
    """One job.

    Attributes:
        job: As it was found last.
        ended: Why there is nothing more to read; empty as long as the job runs.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ended = ""
        self._searched = self._seen = time.monotonic()

    def read(self) -> Sequence[RankSnapshot]:
        """What the ranks of the open groups show now; nothing between two groups of a job."""
        now = time.monotonic()
        if now >= self._searched + SEARCH_S:
            self._searched = now
            found = self._search()
        else:
            found = read_processes(self.job.pids, None)
        running = [s for s in latest(found) if s.state != "left"]
        if any(s.liveness != "ended" for s in running):
            self.job = self.job._replace(snapshots=running)
            self._seen = now
            return running
        self.ended = self._why_ended(now)
        return []

    def _search(self) -> Sequence[RankSnapshot]:
        """The ranks of the job, with those that have joined."""
        known = {snapshot.info.process for snapshot in self.job.snapshots}
        return [
            snapshot
            for job in find_jobs(read_segments().snapshots)
            if known & {snapshot.info.process for snapshot in job.snapshots}
            for snapshot in job.snapshots
        ]

    def _why_ended(self, now: float) -> str:
        processes = {snapshot.info.process for snapshot in self.job.snapshots}
        if not any(map(process_state, processes)):
            return "the job has ended"
        return "the job has closed its groups" if now >= self._seen + CLOSED_S else ""
