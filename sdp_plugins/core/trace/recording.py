"""Which groups of this process are traced, and where what they recorded is written."""

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import _native, trace_file
from ..process_identity import process_identity
from ..topology import Topology, place_in_job
from .chrome import Recorded, Seat, Span, draw
from .events import unpack
from .naming import clock, free_path

MOST_SPANS = _native.TRACE_EVENTS
MOST_OF_CLOSED_GROUPS = _native.TRACE_EVENTS
"""Events that are kept of groups that have been closed."""
MOST_CLOSED_GROUPS = 1000

Write = Callable[[int, dict[str, Any]], Path]
"""Writes the trace of a rank; returns where."""


@dataclass(eq=False)
class Member:
    """A group that is open in this process."""

    seat: Seat
    native: _native.NativeGroup
    number: int = 0
    label: str = ""

    def recorded(self, failure: BaseException | None) -> Recorded:
        """What it has recorded so far."""
        packed, dropped = self.native.trace_events()
        text = "" if failure is None else str(failure)
        return Recorded(self.seat, self.number, self.label, [*unpack(packed)], dropped, text)


def in_folder(folder: str | os.PathLike[str]) -> Write:
    """Write ``rank-00003.json`` in a folder."""

    def write(rank: int, trace: dict[str, Any]) -> Path:
        about = trace["otherData"]
        return trace_file.write(free_path(Path(folder), about), about, trace["traceEvents"])

    return write


class Recorder:
    """The trace of this process. A forked child begins with none.

    Not a group's: a trace shows the groups of a process beside each other.
    """

    def __init__(self) -> None:
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler or a finalizer may close a group
        self._members: list[Member] = []
        self._made: Counter[tuple[str, tuple[int, ...] | None]] = Counter()  # groups in the trace
        self._labels: Counter[str] = Counter()
        self._write: Write | None = None
        self._since = (0, 0)
        self._lasts = False  # until the process ends; otherwise until `stop`
        self._closed: deque[Recorded] = deque()
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._written = False  # all there is so far
        self._forgotten = 0  # events of groups that have been closed
        self._failures = 0  # groups that had failed when this was written
        self._place: Topology | None = None  # as a launcher says
        self._largest = (1, 0)  # group's size; rank in it

    def _own(self) -> None:
        if self._pid != os.getpid():
            self._begin_anew()

    @property
    def on(self) -> bool:
        """Whether operations are recorded."""
        return self._write is not None and self._pid == os.getpid()

    @property
    def lasts(self) -> bool:
        """Whether it goes on until the process ends."""
        return self.on and self._lasts

    # ---- groups --------------------------------------------------------------------------------

    def join(self, seat: Seat, native: _native.NativeGroup, folder: str | None) -> Member:
        """A group has been made here, by a process that is to be traced if a folder is given."""
        self._own()
        with self._lock:
            self._written = False
            place = seat.world_size, seat.rank
            self._largest = max(self._largest, place, key=lambda place: place[0])
            member = Member(seat, native)
            self._members.append(member)
            if folder is not None and self._write is None:
                self._start(in_folder(folder), lasts=True)
            elif self._write is not None:
                self._place = place_in_job() or self._place  # a script may have told it since
                self._record(member)
        return member

    def _record(self, member: Member) -> None:
        """Have a group recorded, as the n-th of its name in this trace."""
        seat = member.seat
        self._made[seat.name, seat.members] += 1
        self._labels[seat.name] += 1
        member.number, shown = self._made[seat.name, seat.members], self._labels[seat.name]
        member.label = seat.name if shown == 1 else f"{seat.name} ({shown})"
        member.native.start_trace()

    def leave(self, member: Member, failure: BaseException | None) -> None:
        """A group has been closed here; the last one to go has the trace written."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if member not in self._members:
                return
            self._members.remove(member)
            if self._write is None:
                return
            self._written = False
            self._keep(member.recorded(failure))
            member.native.stop_trace()
            if self._lasts and not self._members:
                self._write_or_warn()

    def _keep(self, recorded: Recorded) -> None:
        """Keep a closed group's events, at the cost of those of groups closed before it."""
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

    def failed(self) -> None:
        """An operation has failed: whoever started this process may end it at any moment."""
        if not self.lasts:
            return
        failures = sum(member.native.failure() is not None for member in self._members)
        if failures > self._failures:  # later operations fail for the same reason
            self._failures = failures
            self._write_or_warn()

    # ---- the trace -----------------------------------------------------------------------------

    def start(self, write: Write) -> None:
        """Record from now on.

        Raises:
            RuntimeError: A trace is being recorded.
        """
        self._own()
        with self._lock:
            if self._write is not None:
                raise RuntimeError(
                    "a trace is being recorded already. Hint: stop it before, or unset SDP_TRACE."
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
        for member in self._members:
            self._record(member)
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def stop(self) -> Path | None:
        """Write the trace and end it; where it is, None if there was none."""
        if not self.on:
            return None
        with self._lock:
            for member in self._members:
                member.native.stop_trace()
            try:
                return self._write_now()
            finally:
                self._write = None

    def add_span(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Draw a stretch of the program, by ``time.monotonic_ns()``."""
        if self.on:
            self._written = False
            self._spans.append(Span(name, begin_ns, end_ns, threading.current_thread().name))

    def _at_exit(self) -> None:
        if self.on and (self._members or not self._written):
            self._write_or_warn()

    def _write_or_warn(self) -> None:
        try:
            with self._lock:
                self._write_now()
        except Exception as error:  # a trace must not end what it shows
            with suppress(Exception):
                warnings.warn(f"the trace of this rank is not written: {error}", stacklevel=2)

    def _write_now(self) -> Path:
        assert self._write is not None
        members = [member.recorded(member.native.failure()) for member in self._members]
        trace = self._trace([*self._closed, *members])
        path = self._write(trace["otherData"]["rank"], trace)
        self._written = True
        return path

    def _dropped(self, groups: list[Recorded]) -> dict[str, int]:
        dropped = {group.label: group.dropped for group in groups if group.dropped}
        return dropped | ({"groups closed long ago": self._forgotten} if self._forgotten else {})

    def _job(self) -> tuple[int, int, str]:
        """This process's rank, the job's size and what tells it from other jobs.

        A process may have started others after it was launched, which made a group that is larger
        than its launcher knows.
        """
        (size, rank), place = self._largest, self._place
        if place is None or place.world_size < size:
            return rank, size, ""
        return place.rank, place.world_size, place.job_key

    def _trace(self, groups: list[Recorded]) -> dict[str, Any]:
        rank, size, job = self._job()
        host, (wall_ns, monotonic_ns) = socket.gethostname(), self._since
        about = {
            "rank": rank,
            "world_size": size,
            "job": job,
            "host": host,
            "clock": clock(),
            "process": process_identity(os.getpid()),
            "wall_minus_monotonic_us": (wall_ns - monotonic_ns) / 1000,
            "started_us": monotonic_ns / 1000,
            "dropped": self._dropped(groups),
            "failures": {group.label: group.failure for group in groups if group.failure},
            "groups": {group.label: group.about for group in groups},
        }
        events = draw(rank, host, groups, list(self._spans))
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


recorder = Recorder()
