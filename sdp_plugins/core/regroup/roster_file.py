"""The launcher's file of a job's rosters: who has made the latest group."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..launcher_file import LauncherFile
from .roster import Roster

_MOST_NBYTES = 2**26


def note(path: str | None, roster: Roster) -> None:
    """Add a roster to the launcher's file, if it has given one."""
    if path is None:
        return
    with suppress(OSError):  # it has ended, and so will this process
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, json.dumps(roster.to_json()).encode() + b"\n")
        finally:
            os.close(fd)


def latest(path: str | None) -> Roster | None:
    """The roster of the latest group; None if there is none, or no file."""
    data = b""
    if path is not None:
        with suppress(OSError):  # the launcher has ended
            data = Path(path).read_bytes()
    return max(_read(data), key=lambda roster: roster.view, default=None)


def _read(data: bytes) -> Iterator[Roster]:
    for line in data.splitlines():
        with suppress(ValueError, TypeError):
            yield Roster.from_json(json.loads(line))


class RosterFile(LauncherFile):
    """The file, as the launcher reads it."""

    def __init__(self) -> None:
        super().__init__("sdp-rosters")
        self._read_nbytes = 0

    def new(self) -> list[Roster]:
        """The rosters that have been added since the last call."""
        data = os.pread(self._fd, _MOST_NBYTES, self._read_nbytes)
        whole = data[: data.rfind(b"\n") + 1]
        self._read_nbytes += len(whole)
        return list(_read(whole))
