"""The groups of this process, and what it says of them when one fails or it is asked."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from .. import _native
from ..errors import SdpError
from .about import About
from .life import life
from .meeting import Meeting
from .meeting_lines import meeting_lines
from .report import error_lines, groups_of, report
from .report_file import write
from .segments import look_beyond
from .sheet import Sheet, parse
from .signal_watch import SignalWatch
from .waits import waits

_HEAD = "The flight recorder, of this node's ranks:"
READ_S = 0.05
"""As long an error waits for what other groups than the failed one have to tell."""


@dataclass(eq=False)
class Member:
    """A group that is open in this process.

    Attributes:
        native: Its ranks of this node.
        size: How many these are.
        about: This rank.
        folder: Where a report goes when the group fails; None: nowhere.
        note: What was said when it failed; None: it has not.
    """

    native: _native.NativeGroup
    size: int
    about: About
    folder: str | None
    note: str | None = None

    def rename(self, name: str) -> None:
        """Show another name of the group from now on."""
        self.about = self.about._replace(name=name)
        self.native.set_about(self.about.pack())
        self.native.set_head(self.about.names.head(self.about.rank))

    def sheets(self) -> list[Sheet]:
        """What the ranks of this node show."""
        found = []
        for rank in range(self.size):
            with suppress(ValueError):  # a peer may have written anything
                sheet = parse(self.native.flight(rank))
                found.append(sheet._replace(life=life(sheet.about)))
        return found


class Members:
    """All open groups of this process. A forked child begins with none."""

    def __init__(self) -> None:
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler or a finalizer may close a group
        self._open: list[Member] = []
        self._watch: SignalWatch | None = None
        self._meetings: list[Meeting] = []

    @contextmanager
    def meeting(self, meeting: Meeting) -> Iterator[None]:
        """Meanwhile this process makes a group: its open ones tell, so that others see it."""
        if self._pid != os.getpid():  # what is open is the parent's
            yield
            return
        self._meetings.append(meeting)
        self._tell()
        try:
            yield
        except SdpError as error:
            with suppress(Exception):  # it must not hide what it explains
                self._explain(error)
            self._end(meeting, meeting._replace(until_ns=time.monotonic_ns()))
            raise
        except BaseException:
            self._end(meeting, None)
            raise
        self._end(meeting, None)

    def _end(self, meeting: Meeting, failed: Meeting | None) -> None:
        with self._lock:
            if meeting in self._meetings:  # a forked child has begun anew
                self._meetings.remove(meeting)
                self._tell(failed)

    def _tell(self, last: Meeting | None = None) -> None:
        """Have open groups show the meeting that goes on, or else the one that has failed last."""
        with self._lock:
            shown = last
            if self._meetings:
                shown = self._meetings[0]._replace(others=len(self._meetings) - 1)
            text, since_ns = (shown.text(), shown.since_ns) if shown else (b"", 0)
            for member in self._open:
                member.native.meet(text, since_ns)

    def _explain(self, error: SdpError) -> None:
        """Add to the error of a meeting who has come to it and what the others are at."""
        with self._lock:
            if not self._open:
                return
            largest = max(self._open, key=lambda member: member.about.world_size)
            sheets, _ = self._read(largest)
            lines = meeting_lines(groups_of(sheets))
            lines += _leave_report(largest, sheets)
            if lines and hasattr(error, "add_note"):
                error.add_note("\n".join([_HEAD, *lines]))

    def join(self, member: Member) -> None:
        """A group has been made here; with the first one SIGUSR1 gets its meaning."""
        if self._pid != os.getpid():
            if self._watch is not None:
                self._watch.forget()
            self._begin_anew()
        with self._lock:
            self._open.append(member)
            if self._watch is None:
                # Without descriptors or threads to spare the group does what it is for.
                with suppress(OSError, RuntimeError):
                    self._watch = SignalWatch(self.show)

    def leave(self, member: Member) -> None:
        """A group has been closed here; with the last one SIGUSR1 loses its meaning."""
        watch = None
        if self._pid != os.getpid():
            return
        with self._lock:
            if member in self._open:
                self._open.remove(member)
            if not self._open:
                watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()

    def note(self, token: int) -> str:
        """Who waited for whom when a group failed, made when it is asked first; may be empty."""
        if self._pid != os.getpid():
            return ""
        with self._lock:
            member = next((m for m in self._open if m.about.token == token), None)
            if member is None:
                return ""
            if member.note is None:
                member.note = ""  # whatever happens, it is tried once
                sheets, lines = self._tell_of(member)
                member.note = "\n".join([*lines, *_leave_report(member, sheets)])
            return member.note

    def standing(self, member: Member) -> str:
        """Who waits for whom in a group now."""
        if self._pid != os.getpid():
            return ""
        with self._lock:
            return "\n".join(self._tell_of(member)[1])

    def _tell_of(self, member: Member) -> tuple[list[Sheet], list[str]]:
        sheets, left_out = self._read(member)
        lines = [_HEAD, *error_lines(member.about.token, groups_of(sheets))]
        if left_out:
            lines.append(f"{left_out} more groups here were not read; they may tell why.")
        return sheets, lines

    def _read(self, first: Member) -> tuple[list[Sheet], int]:
        """A group's sheets and those of others; how many others there was no time for.

        Whoever waits for the error waits for this. A report that is to be left has all.
        """
        others = [member for member in self._open if member is not first]
        end = None if first.folder else time.monotonic() + READ_S
        sheets = first.sheets()
        while others and (end is None or time.monotonic() < end):
            sheets += others.pop(0).sheets()
        return sheets + _beyond(sheets, end), len(others)

    def _sheets(self) -> list[Sheet]:
        sheets = [sheet for member in self._open for sheet in member.sheets()]
        return sheets + _beyond(sheets)

    def show(self) -> None:
        """Write to stderr what the ranks of this node wait for, now."""
        with self._lock:
            if not self._open:  # the last one is being closed
                return
            largest = max((m.about for m in self._open), key=lambda about: about.world_size)
            lines = report(self._sheets())
        who = f"rank {largest.job_rank} (pid {os.getpid()})"
        head = f"{who}, SIGUSR1: this node's ranks at the moment"
        os.write(2, "".join(f"{line}\n" for line in (head, *lines)).encode())


def _beyond(sheets: Sequence[Sheet], end: float | None = None) -> list[Sheet]:
    """What ranks that others wait for show in groups of which this one is no member."""
    awaited = {
        group[rank].sheet.about.pid
        for group in groups_of(sheets).values()
        for wait in waits(group)
        for rank in wait.targets
        if rank in group and group[rank].sheet.life in ("running", "stopped")
    }
    return look_beyond(awaited - {os.getpid()}, end)


def _leave_report(member: Member, sheets: Sequence[Sheet]) -> list[str]:
    """Write the file that was asked for; what the note says of it."""
    if member.folder is None or not sheets:
        return []
    try:
        path = write(member.folder, member.about.job_rank, sheets)
    except OSError as error:  # what is reported must not be hidden
        with suppress(Exception):
            warnings.warn(f"no report of the flight recorder is left: {error}", stacklevel=2)
        return []
    return [f"All groups: python -m sdp_plugins.trace {path.parent}"]


members = Members()
