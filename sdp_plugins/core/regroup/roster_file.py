"""The launcher's file of a job's rosters: who has made the latest group."""

from __future__ import annotations

import json
import os
from contextlib import suppress

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
        rosters = []
        for line in whole.splitlines():
            with suppress(ValueError, TypeError):
                rosters.append(Roster.from_json(json.loads(line)))
        return rosters
