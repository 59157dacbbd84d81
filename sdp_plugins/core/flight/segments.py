"""The segments of all processes that this user may look into."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from .. import _native
from ..errors import SdpError
from ..process_identity import own_pid, process_identity, process_state
from .life import life
from .sheet import Sheet, parse

_Files = dict[tuple[int, int], list[tuple[int, int]]]
_LINK = "/memfd:sdp-"
_ANY_VERSION = b"sdpalk"


class Found(NamedTuple):
    """What there is to see.

    Attributes:
        sheets: Of all ranks.
        others: Segments of other versions of this package.
    """

    sheets: list[Sheet]
    others: int


def look() -> Found:
    """Read all segments; those of ranks that have died are held by others of their groups."""
    return _read_all(_holders(map(int, filter(str.isdigit, os.listdir("/proc")))), None)


def look_beyond(pids: Iterable[int], end: float | None) -> list[Sheet]:
    """Read the segments of some processes that this one has not.

    Args:
        pids: Their ids.
        end: When to stop, by the monotonic clock; None: never.
    """
    ours = _holders([os.getpid()])
    theirs = {file: at for file, at in _holders(pids).items() if file not in ours}
    found = _read_all(theirs, end).sheets
    # Others than these may hold their own segments, too.
    return [s if s.life != "ended" else s._replace(life=life(s.about)) for s in found]


def _read_all(files: _Files, end: float | None) -> Found:
    sheets, others = [], 0
    for holders in files.values():
        if end is not None and time.monotonic() > end:
            break
        found = _read(holders)
        if isinstance(found, Sheet):
            sheets.append(found)
        others += found is True
    return Found(sheets, others)


def _holders(pids: Iterable[int]) -> _Files:
    """Processes and their descriptors by file."""
    found: _Files = {}
    for pid in pids:
        for fd, path in _segments_of(pid):
            with suppress(OSError):
                about = os.stat(path)
                found.setdefault((about.st_dev, about.st_ino), []).append((pid, fd))
    return found


def _segments_of(pid: int) -> Iterator[tuple[int, str]]:
    with suppress(OSError):  # it is another user's, or has ended
        for fd in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{fd}"
            with suppress(OSError):
                if os.readlink(path).startswith(_LINK):
                    yield int(fd), path


def _read(holders: list[tuple[int, int]]) -> Sheet | bool:
    """A rank's sheet; or else whether it is one of another version."""
    for pid, fd in holders:
        with suppress(OSError):
            file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                return _alive(parse(_native.read_flight(file)), holders)
            except (SdpError, ValueError):
                return os.pread(file, len(_ANY_VERSION), 0) == _ANY_VERSION
            finally:
                os.close(file)
    return False


def _alive(sheet: Sheet, holders: list[tuple[int, int]]) -> Sheet:
    """With its process as it is called here: in a container it has another id.

    A rank holds its own segment as long as it has the group, so one that does not is no more.
    """
    for pid in {pid for pid, _ in holders}:
        identity = process_identity(pid)
        if f"{own_pid(pid)}@{identity.partition('@')[2]}" == sheet.about.process:
            state = process_state(identity)
            life = "stopped" if state in ("T", "t") else "running" if state else "ended"
            return sheet._replace(life=life, about=sheet.about._replace(process=identity))
    return sheet._replace(life="ended")
