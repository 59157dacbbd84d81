"""Processes forked from one that has imported what they need: a rank with torch starts at once.

A server belongs to a folder of tests and imports its modules as functions of them are asked for. It
forks twice, so that what it forks are children of the test process, which adopts orphans.
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
from collections.abc import Mapping
from pathlib import Path

SERVER = Path(__file__).with_name("rank_child.py")
PR_SET_CHILD_SUBREAPER = 36
# Those of one server have the same addresses and hashes. Ranks of a job must not all have these.
SERVERS_OF_A_FOLDER = 2
START_LIMIT_S = 200.0  # imports on a busy machine

_servers: dict[tuple[str, int], ForkServer] = {}


def adopt_orphans() -> None:
    """Have orphans come to this process instead of init, where they are seen."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def fork(module: str, which: int, environment: Mapping[str, str], *fds: int) -> Forked:
    """A process that serves cases (`rank_child.serve`) and has imported a module.

    Args:
        module: Its folder's server forks the process; servers of other folders end.
        which: Of a job's processes: neighbours come from different servers.
        environment: All of it.
        *fds: The connection to serve, and the output.
    """
    folder = module.rpartition(".")[0]
    if any(other != folder for other, _ in _servers):
        close_servers()
    if not _servers:  # they import at the same time
        _servers.update({(folder, i): ForkServer(module) for i in range(SERVERS_OF_A_FOLDER)})
    return _servers[folder, which % SERVERS_OF_A_FOLDER].fork(module, environment, *fds)


def server_pids() -> set[int]:
    """The servers' process ids."""
    return {server.process.pid for server in _servers.values()}


def server_fds() -> set[int]:
    """The descriptors that belong to servers."""
    return {server.socket.fileno() for server in _servers.values()}


def close_servers() -> None:
    """End all servers; what they have forked goes on."""
    while _servers:
        _servers.popitem()[1].close()


class ForkServer:
    """A process that imports, and forks."""

    def __init__(self, module: str) -> None:
        adopt_orphans()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(START_LIMIT_S)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(SERVER), "forks", str(theirs.fileno()), str(os.getpid())],
                env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # not for a terminal's Ctrl-C
            )
        self.socket.send(pickle.dumps((sys.path, module)))

    def fork(self, module: str, environment: Mapping[str, str], *fds: int) -> Forked:
        """One more process."""
        socket.send_fds(self.socket, [pickle.dumps((module, dict(environment)))], fds)
        return Forked(int(self.socket.recv(100)))

    def close(self) -> None:
        """End the server."""
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
