"""The reports of this process: when a group fails, and on SIGUSR1."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary

from sdp_plugins.core.errors import add_note
from sdp_plugins.core.open_groups import GroupObserver, OpenGroup, open_groups
from sdp_plugins.flight import report_file
from sdp_plugins.flight.forming_lines import forming_lines
from sdp_plugins.flight.rank_snapshot import RankSnapshot, liveness, parse
from sdp_plugins.flight.report_signal import ReportSignal
from sdp_plugins.flight.segments import read_processes
from sdp_plugins.flight.wait_report import error_lines, groups_of, report
from sdp_plugins.flight.waits import waits

_HEAD = "Flight recorder (ranks of this node):"
READ_S = 1.0
"""Limit for reading groups other than the failed one, which delays the error."""


class FlightRecorder(GroupObserver):
    """Adds to errors which ranks waited for which others, writes report files, answers SIGUSR1."""

    def __init__(self) -> None:
        self._signal: ReportSignal | None = None
        self._start_anew()

    def _start_anew(self) -> None:
        self._lock = threading.RLock()  # a signal handler or a finalizer may close a group
        self._notes: WeakKeyDictionary[OpenGroup, str] = WeakKeyDictionary()

    def forked(self) -> None:
        """Restore the default of SIGUSR1: the thread that handles it is the parent's."""
        self._start_anew()
        if self._signal is not None:
            self._signal.forget()
            self._signal = None

    def opened(self, group: OpenGroup) -> None:
        """Handle SIGUSR1 from the first group on."""
        with self._lock:
            if self._signal is None:
                # A process without descriptors or threads to spare can still use the group.
                with suppress(OSError, RuntimeError):
                    self._signal = ReportSignal(self.show)

    def closed(self, group: OpenGroup) -> None:
        """Stop handling SIGUSR1 with the last group."""
        ending = None
        with self._lock:
            if not any(open_groups):
                ending, self._signal = self._signal, None
        if ending is not None:
            ending.end()

    def group_failed(self, group: OpenGroup, error: Exception) -> None:
        """Add which ranks waited for which others at the group's first error."""
        with self._lock:
            if group not in self._notes:
                self._notes[group] = ""  # try only once, even if it fails
                snapshots, lines = _explain(group)
                self._notes[group] = "\n".join([*lines, *_write_report(group, snapshots)])
            add_note(error, self._notes[group])

    def wait_timed_out(self, group: OpenGroup, error: Exception) -> None:
        """Add which ranks of the group wait for which others now."""
        with self._lock:
            add_note(error, "\n".join(_explain(group)[1]))

    def rendezvous_failed(self, error: Exception) -> None:
        """Add which ranks have come to the rendezvous, and what the others are doing."""
        with self._lock:
            largest = _largest_group()
            if largest is None:
                return
            snapshots, _ = _read(largest)
            lines = forming_lines(groups_of(snapshots)) + _write_report(largest, snapshots)
            if lines:
                add_note(error, "\n".join([_HEAD, *lines]))

    def show(self) -> None:
        """Write to stderr what the ranks of this node wait for, now."""
        with self._lock:
            largest = _largest_group()
            if largest is None:  # the last one is being closed
                return
            snapshots, _ = _read(largest, limited=False)
            lines = report(snapshots)
        who = f"rank {largest.info.global_rank} (pid {os.getpid()})"
        head = f"{who}, SIGUSR1: this node's ranks at the moment"
        os.write(2, "".join(f"{line}\n" for line in (head, *lines)).encode())


def read_group(group: OpenGroup) -> list[RankSnapshot]:
    """What the ranks of this node show in a group."""
    found = []
    for rank in range(group.local_size):
        with suppress(ValueError):  # a peer may have written anything
            snapshot = parse(group.native.flight(rank))
            found.append(snapshot._replace(liveness=liveness(snapshot.info)))
    return found


def _explain(group: OpenGroup) -> tuple[list[RankSnapshot], list[str]]:
    snapshots, left_out = _read(group)
    lines = [_HEAD, *error_lines(group.info.token, groups_of(snapshots))]
    if left_out:
        lines.append(f"{left_out} more groups on this node were not read; the cause may be there.")
    return snapshots, lines


def _largest_group() -> OpenGroup | None:
    return max(open_groups, key=lambda group: group.info.world_size, default=None)


def _read(first: OpenGroup, *, limited: bool = True) -> tuple[list[RankSnapshot], int]:
    """Read a group, then others; returns the snapshots and the number of groups left out.

    This delays an error, so it has a limit, unless a report file is wanted: that has all groups.
    """
    others = [group for group in open_groups if group is not first]
    end = time.monotonic() + READ_S if limited and not first.config.flight_dir else None
    snapshots = read_group(first)
    while others and (end is None or time.monotonic() < end):
        snapshots += read_group(others.pop(0))
    return snapshots + _other_groups(snapshots, end), len(others)


def _other_groups(snapshots: Sequence[RankSnapshot], end: float | None) -> list[RankSnapshot]:
    """Snapshots of awaited ranks in groups of which this rank is not a member."""
    awaited = {
        group[rank].snapshot.info.pid
        for group in groups_of(snapshots).values()
        for wait in waits(group)
        for rank in wait.targets
        if rank in group and group[rank].snapshot.liveness in ("running", "stopped")
    }
    return read_processes(awaited - {os.getpid()}, end)


def _write_report(group: OpenGroup, snapshots: Sequence[RankSnapshot]) -> list[str]:
    """Write the report file if one is wanted; returns lines with its path."""
    if group.config.flight_dir is None or not snapshots:
        return []
    try:
        path = report_file.write(group.config.flight_dir, group.info.global_rank, snapshots)
    except OSError as error:  # it must not replace the group's error
        with suppress(Exception):
            warnings.warn(f"cannot write the flight recorder's report: {error}", stacklevel=2)
        return []
    return [f"All groups: python -m sdp_plugins.flight {path.parent}"]


flight_recorder = FlightRecorder()
