"""Processes forked from one that has imported what they need: a rank with torch starts at once.

Servers belong to a folder of tests, whose modules they import as functions of them are asked for,
or to a pool with an environment of its own. They fork twice, so that what they fork are children of
the test process, which adopts orphans.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

SERVER = Path(__file__).with_name("rank_child.py")
PR_SET_CHILD_SUBREAPER = 36
# What one server forks has the same addresses and hashes. Ranks of a job must not all have these.
SERVERS = 2
START_LIMIT_S = 200.0  # imports on a busy machine

_open: set[ForkServer] = set()
_of_folder: dict[str, ForkServers] = {}  # of one at most


def adopt_orphans() -> None:
    """Have orphans come to this process instead of init, where they are seen."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


Fork = Callable[[int, Mapping[str, str], int, int], "Forked"]
"""Makes a process that serves cases (`rank_child.serve`) out of one that has imported a module.

Its arguments: which one of a job's it is, as neighbours come from different servers; all of its
environment; the connection to serve; and the output.
"""


def forks_of(module: str) -> Fork:
    """Forks of the servers of the module's folder; at the first one, those of other folders end."""

    def fork(which: int, environment: Mapping[str, str], *fds: int) -> Forked:
        folder = module.rpartition(".")[0]
        if folder not in _of_folder:
            close_servers()
            _of_folder[folder] = ForkServers(module, os.environ)
        return _of_folder[folder].fork(module, which, environment, *fds)

    return fork


def close_servers() -> None:
    """End the servers of folders; what they have forked goes on."""
    while _of_folder:
        _of_folder.popitem()[1].close()


def server_pids() -> set[int]:
    """All servers' process ids."""
    return {server.process.pid for server in _open}


def server_fds() -> set[int]:
    """The descriptors that belong to servers."""
    return {server.socket.fileno() for server in _open}


class ForkServers:
    """Servers with a module and an environment in common."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        # They import at the same time.
        self._servers = [ForkServer(module, environment) for _ in range(SERVERS)]

    def fork(self, module: str, which: int, environment: Mapping[str, str], *fds: int) -> Forked:
        """A `Fork` with a module, which all later ones then have, too."""
        return self._servers[which % SERVERS].fork(module, environment, *fds)

    def close(self) -> None:
        """End them; what they have forked goes on."""
        for server in self._servers:
            server.close()


class ForkServer:
    """A process that imports, and forks."""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        adopt_orphans()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(START_LIMIT_S)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(SERVER), "forks", str(theirs.fileno()), str(os.getpid())],
                env={"OMP_NUM_THREADS": "1", **environment},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # not for a terminal's Ctrl-C
            )
        _open.add(self)
        self.socket.send(pickle.dumps((sys.path, module)))

    def fork(self, module: str, environment: Mapping[str, str], *fds: int) -> Forked:
        """One more process."""
        socket.send_fds(self.socket, [pickle.dumps((module, dict(environment)))], fds)
        return Forked(int(self.socket.recv(100)))

    def close(self) -> None:
        """End the server."""
        _open.discard(self)
        self.socket.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Forked:
    """A child that a server has forked; what `subprocess.Popen` offers for others."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            pidfd = os.pidfd_open(self.pid)
            try:
                left = None if end is None else max(0.0, end - time.monotonic())
                if not select.select([pidfd], [], [], left)[0]:
                    raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
            finally:
                os.close(pidfd)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.Signals(number))
