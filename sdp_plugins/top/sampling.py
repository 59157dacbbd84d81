"""Readings of a job over the last seconds, and what they show together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from sdp_plugins.flight.describe_rank import Groups
from sdp_plugins.flight.rank_snapshot import RankSnapshot
from sdp_plugins.flight.wait_report import groups_of
from sdp_plugins.top.figures import figures_of
from sdp_plugins.top.job_watch import JobWatch
from sdp_plugins.top.view import JobView, view_of

WINDOW_S = 5.0
"""Figures are those of this time; a step may take longer than the pause between readings."""


class Sampling:
    """Reads a job when it is told to; another thread may ask for what was read last.

    Args:
        watch: Reads the job.
        interval_s: The pause between two readings.
    """

    def __init__(self, watch: JobWatch, interval_s: float) -> None:
        self._watch = watch
        self._latest: Sequence[RankSnapshot] = []
        self._readings: deque[Groups] = deque(maxlen=1 + max(1, round(WINDOW_S / interval_s)))
        self._lock = threading.Lock()

    @property
    def ended(self) -> str:
        """Why there is nothing more to read; empty as long as the job runs."""
        return self._watch.ended

    def read(self) -> None:
        """Read the job once more."""
        snapshots = self._watch.read()
        with self._lock:
            self._latest = snapshots
            if snapshots:
                self._readings.append(groups_of(snapshots))

    def latest(self) -> Sequence[RankSnapshot]:
        """What was read last."""
        with self._lock:
            return self._latest

    def view(self) -> JobView:
        """What the job has done between the first and the last reading of the window."""
        with self._lock:
            first, last = (self._readings[i] if self._readings else {} for i in (0, -1))
        return view_of(self._watch.job, figures_of(first, last))
