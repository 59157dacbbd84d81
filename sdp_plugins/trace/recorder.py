"""Records the trace of this process and writes it."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdp_plugins.core import _native
from sdp_plugins.core.open_groups import GroupObserver, OpenGroup, open_groups
from sdp_plugins.core.process_identity import clock_id, process_identity
from sdp_plugins.core.topology import Topology, place_in_job
from sdp_plugins.core.trace_event import unpack
from sdp_plugins.trace import trace_file
from sdp_plugins.trace.chrome import RecordedGroup, Span, draw
from sdp_plugins.trace.folder import free_path

MOST_SPANS = _native.TRACE_EVENTS
MOST_OF_CLOSED_GROUPS = _native.TRACE_EVENTS
"""Events that are kept of groups that have been closed."""
MOST_CLOSED_GROUPS = 1000

Write = Callable[[int, dict[str, Any]], Path]
"""Writes the trace of a rank; returns its path."""


def in_folder(folder: str | os.PathLike[str]) -> Write:
    """Write ``rank-00003.json`` in a folder."""

    def write(rank: int, trace: dict[str, Any]) -> Path:
        about = trace["otherData"]
        return trace_file.write(free_path(Path(folder), about), about, trace["traceEvents"])

    return write


class TraceRecorder(GroupObserver):
    """Records the trace of this process, which shows its groups together."""

    def __init__(self) -> None:
        self._start_anew()

    def _start_anew(self) -> None:
        self._lock = threading.RLock()  # a signal handler or a finalizer may close a group
        self._open: dict[OpenGroup, RecordedGroup] = {}  # without events, which the groups hold
        self._made: Counter[tuple[str, tuple[int, ...] | None]] = Counter()  # groups in the trace
        self._labels: Counter[str] = Counter()
        self._write: Write | None = None
        self._since = (0, 0)
        self._lasts = False  # records until the process ends; otherwise until `stop`
        self._closed: deque[RecordedGroup] = deque()
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._written = False  # whether everything recorded so far is written
        self._forgotten = 0  # number of events of closed groups that were dropped
        self._failures = 0  # number of groups that had failed when the trace was last written
        self._place: Topology | None = None  # according to the launcher
        self._largest = (1, 0)  # a group's size, and the rank in it

    @property
    def on(self) -> bool:
        """Whether operations are recorded."""
        return self._write is not None

    @property
    def lasts(self) -> bool:
        """Whether recording goes on until the process ends."""
        return self.on and self._lasts

    # ---- groups --------------------------------------------------------------------------------

    def forked(self) -> None:
        """A forked child begins without a trace."""
        self._start_anew()

    def opened(self, group: OpenGroup) -> None:
        """Record the group, if a trace is being recorded or its settings ask for one."""
        with self._lock:
            self._written = False
            place = group.info.world_size, group.info.rank
            self._largest = max(self._largest, place, key=lambda place: place[0])
            if self.on:
                self._place = place_in_job() or self._place  # the script may have set it since
                self._record(group)
            elif group.config.trace is not None:
                self._start(in_folder(group.config.trace), lasts=True)

    def _record(self, group: OpenGroup) -> None:
        """Record a group, as the n-th of its name in this trace."""
        if group in self._open:
            return
        name, members = group.name, group.info.members
        self._made[name, members] += 1
        self._labels[name] += 1
        number, shown = self._made[name, members], self._labels[name]
        label = name if shown == 1 else f"{name} ({shown})"
        self._open[group] = RecordedGroup(name, group.info, number, label)
        group.native.start_trace()

    def closed(self, group: OpenGroup) -> None:
        """Keep the group's record; write the trace when the last group closes."""
        with self._lock:
            if group not in self._open:
                return
            self._written = False
            self._keep(_recorded(group, self._open.pop(group)))
            group.native.stop_trace()
            if self._lasts and not self._open:
                self._write_or_warn()

    def _keep(self, recorded: RecordedGroup) -> None:
        """Keep a closed group's events, and drop those of groups closed earlier if necessary."""
        self._closed.append(recorded)
        excess = sum(len(kept.events) for kept in self._closed) - MOST_OF_CLOSED_GROUPS
        while excess > 0 or len(self._closed) > MOST_CLOSED_GROUPS:
            kept = self._closed.popleft()
            cut = max(0, min(excess, len(kept.events)))
            excess -= cut
            if cut < len(kept.events) and len(self._closed) < MOST_CLOSED_GROUPS:
                rest, dropped = kept.events[cut:], kept.dropped + cut
                self._closed.appendleft(replace(kept, events=rest, dropped=dropped))
            else:
                self._forgotten += kept.dropped + len(kept.events)

    def operation_failed(self) -> None:
        """Write the trace: the launcher may end this process at any moment."""
        if not self.lasts:
            return
        failures = sum(bool(group.failure) for group in tuple(self._open))
        if failures > self._failures:  # later operations fail for the same cause
            self._failures = failures
            self._write_or_warn()

    # ---- the trace -----------------------------------------------------------------------------

    def start(self, write: Write) -> None:
        """Record from now on.

        Raises:
            RuntimeError: A trace is being recorded.
        """
        open_groups.observe(self)
        with self._lock:
            if self.on:
                raise RuntimeError(
                    "a trace is being recorded already. Hint: call stop(), or unset SDP_TRACE."
                )
            self._start(write, lasts=False)

    def _start(self, write: Write, *, lasts: bool) -> None:
        self._write, self._lasts = write, lasts
        self._since = time.time_ns(), time.monotonic_ns()
        self._closed.clear()
        self._spans.clear()
        self._forgotten = self._failures = 0
        self._made.clear()
        self._labels.clear()
        self._place = place_in_job()
        self._open.clear()
        for group in open_groups:
            self._record(group)
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def stop(self) -> Path | None:
        """Write the trace and stop recording; returns its path, None if there was no trace."""
        if not self.on:
            return None
        with self._lock:
            for group in tuple(self._open):
                group.native.stop_trace()
            try:
                return self._write_now()
            finally:
                self._write = None
                self._open.clear()

    def add_span(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Add a span of the program; times are those of ``time.monotonic_ns()``."""
        if self.on:
            self._written = False
            self._spans.append(Span(name, begin_ns, end_ns, threading.current_thread().name))

    def _at_exit(self) -> None:
        if self.on and (self._open or not self._written):
            self._write_or_warn()

    def _write_or_warn(self) -> None:
        try:
            with self._lock:
                self._write_now()
        except Exception as error:  # a trace must not end the program
            with suppress(Exception):
                warnings.warn(f"the trace of this rank was not written: {error}", stacklevel=2)

    def _write_now(self) -> Path:
        assert self._write is not None
        closed, open_ = tuple(self._closed), tuple(self._open.items())  # a finalizer may close one
        trace = self._trace([*closed, *(_recorded(group, kept) for group, kept in open_)])
        path = self._write(trace["otherData"]["rank"], trace)
        self._written = True
        return path

    def _dropped(self, groups: list[RecordedGroup]) -> dict[str, int]:
        dropped = {group.label: group.dropped for group in groups if group.dropped}
        return dropped | ({"groups closed long ago": self._forgotten} if self._forgotten else {})

    def _job(self) -> tuple[int, int, str]:
        """This process's rank, and the size and the key of its job.

        A launched process may have started others, so a group may be larger than the launcher's
        job.
        """
        (size, rank), place = self._largest, self._place
        if place is None or place.world_size < size:
            return rank, size, ""
        return place.rank, place.world_size, place.job_key

    def _trace(self, groups: list[RecordedGroup]) -> dict[str, Any]:
        rank, size, job = self._job()
        host, (wall_ns, monotonic_ns) = socket.gethostname(), self._since
        about = {
            "rank": rank,
            "world_size": size,
            "job": job,
            "host": host,
            "clock": clock_id(),
            "process": process_identity(os.getpid()),
            "wall_minus_monotonic_us": (wall_ns - monotonic_ns) / 1000,
            "started_us": monotonic_ns / 1000,
            "dropped": self._dropped(groups),
            "failures": {group.label: group.failure for group in groups if group.failure},
            "groups": {group.label: group.about for group in groups},
        }
        events = draw(rank, host, groups, list(self._spans))
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _recorded(group: OpenGroup, kept: RecordedGroup) -> RecordedGroup:
    """What was recorded of a group so far."""
    packed, dropped = group.native.trace_events()
    events = [*unpack(packed)]
    return replace(kept, info=group.info, events=events, dropped=dropped, failure=group.failure)


trace_recorder = TraceRecorder()
