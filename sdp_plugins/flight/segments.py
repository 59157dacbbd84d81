"""The segments of all processes that this user may read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from sdp_plugins.core import _native
from sdp_plugins.core.errors import SdpError
from sdp_plugins.core.process_identity import own_pid, process_identity
from sdp_plugins.flight.rank_snapshot import RankSnapshot, liveness, liveness_of_process, parse

_Files = dict[tuple[int, int], list[tuple[int, int]]]
_LINK = "/memfd:sdp-"
_ANY_VERSION = b"sdpalk"


class Segments(NamedTuple):
    """What the segments show.

    Attributes:
        snapshots: All ranks.
        others: Number of segments that other versions of this package have made.
    """

    snapshots: list[RankSnapshot]
    others: int


def read_segments() -> Segments:
    """Read all segments. Other ranks of a group still hold the segment of a rank that has died."""
    return _read_all(_holders(map(int, filter(str.isdigit, os.listdir("/proc")))), None)


def read_processes(pids: Iterable[int], end: float | None) -> list[RankSnapshot]:
    """Read the segments of some processes, except those that this process holds too.

    It stops at `end`, by CLOCK_MONOTONIC; None: never.
    """
    ours = _holders([os.getpid()])
    theirs = {file: at for file, at in _holders(pids).items() if file not in ours}
    found = _read_all(theirs, end).snapshots
    # Other processes may hold their own segments, too.
    return [s if s.liveness != "ended" else s._replace(liveness=liveness(s.info)) for s in found]


def _read_all(files: _Files, end: float | None) -> Segments:
    snapshots, others = [], 0
    for holders in files.values():
        if end is not None and time.monotonic() > end:
            break
        found = _read(holders)
        if isinstance(found, RankSnapshot):
            snapshots.append(found)
        others += found is True
    return Segments(snapshots, others)


def _holders(pids: Iterable[int]) -> _Files:
    """Processes and their descriptors by file."""
    found: _Files = {}
    for pid in pids:
        for fd, path in _segments_of(pid):
            with suppress(OSError):
                status = os.stat(path)
                found.setdefault((status.st_dev, status.st_ino), []).append((pid, fd))
    return found


def _segments_of(pid: int) -> Iterator[tuple[int, str]]:
    with suppress(OSError):  # another user's process, or it has ended
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            with suppress(OSError):
                if os.readlink(path).startswith(_LINK):
                    yield int(fd), path


def _read(holders: list[tuple[int, int]]) -> RankSnapshot | bool:
    """A rank's snapshot; or whether the segment is of another version."""
    for pid, fd in holders:
        with suppress(OSError):
            file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return _with_process(parse(_native.read_flight(file)), holders)
            except (SdpError, ValueError):
                return os.pread(file, len(_ANY_VERSION), 0) == _ANY_VERSION
            finally:
                os.close(file)
    return False


def _with_process(snapshot: RankSnapshot, holders: list[tuple[int, int]]) -> RankSnapshot:
    """Complete the state of the process, and its id as seen here: in a container it has another.

    A rank holds its own segment as long as it has the group, so a rank without it has ended.
    """
    for pid in {pid for pid, _ in holders}:
        identity = process_identity(pid)
        if f"{own_pid(pid)}@{identity.partition('@')[2]}" == snapshot.info.process:
            info = snapshot.info._replace(process=identity)
            return snapshot._replace(liveness=liveness_of_process(identity), info=info)
    return snapshot._replace(liveness="ended")
