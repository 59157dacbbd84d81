"""Ends sessions: a rank with all processes that it started, even if the launcher was killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress

from sdp_plugins.core.process_identity import stat_fields

ROUNDS = 20  # a member may fork while we look
LOOK_S = 0.05


def members(sessions: Collection[int]) -> list[int]:
    """The live processes of these sessions."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = stat_fields(name)  # state, ppid, pgrp, session, ...
            if fields and int(fields[3]) in sessions and fields[0] not in "ZX":
                found.append(int(name))
    return found


def kill_sessions(sessions: Collection[int]) -> None:
    """SIGKILL all processes of these sessions, whatever their process groups."""
    for _ in range(ROUNDS):
        pids = members(sessions)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return


class Reaper:
    """A process that kills the ranks' sessions if the launcher ends without dismissing it.

    The kernel kills the ranks (PDEATHSIG), but not the processes that they have started. The
    sessions have `grace_s` seconds to end by themselves.
    """

    def __init__(self, grace_s: float = 0.0) -> None:
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._writer)
                kill_orphans(reader, grace_s)
            finally:
                os._exit(0)
        os.close(reader)

    def watch(self, session: int) -> None:
        """Add a rank's session."""
        with suppress(BrokenPipeError):
            os.write(self._writer, b"%d\n" % session)

    def forget(self, session: int) -> None:
        """Remove a session that is empty: its number may become another's."""
        self.watch(-session)

    def dismiss(self) -> None:
        """End the reaper: all sessions are empty."""
        with suppress(BrokenPipeError):
            os.write(self._writer, b"done\n")
        os.close(self._writer)
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def kill_orphans(reader: int, grace_s: float) -> None:
    """Wait for the end of the pipe, then kill the sessions unless the reaper was dismissed."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # or the reader of the launcher's output would wait for the reaper
        os.dup2(nowhere, fd)
    with open(reader, "rb") as pipe:
        words = pipe.read().split()
    if b"done" not in words:
        sessions: set[int] = set()
        for session in map(int, words):
            (sessions.add if session > 0 else sessions.discard)(abs(session))
        end = time.monotonic() + grace_s
        while time.monotonic() < end and members(sessions):
            time.sleep(LOOK_S)
        kill_sessions(sessions)
