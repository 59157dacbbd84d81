"""One rank's process: what it says, how its case ends, and its end."""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

from tests.forked import Fork, Forked

CHILD = Path(__file__).with_name("rank_child.py")
HANG_S = 200.0
"""Ends a wait for what happens in seconds, also where ten programs share a core."""
LEFT_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """How a case ended in one rank."""

    kind: str  # returned | raised | exited | running
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    ended_at: float = 0.0  # time.monotonic() in the rank; one clock for the whole machine
    exitcode: int | None = None

    def describe(self) -> str:
        """One line for a report."""
        if self.kind == "exited":
            return f"exited with {self.exitcode} before it returned"
        return f"{self.kind} (exit code {self.exitcode})" if self.exitcode else self.kind


class RankFailure(AssertionError):
    """A rank did not return; the text holds every rank's outcome, traceback and output."""

    def __init__(self, text: str, outcomes: list[Outcome]) -> None:
        super().__init__(text)
        self.outcomes = outcomes


class Rank:
    """One rank's process."""

    def __init__(self, rank: int, environment: Mapping[str, str], fork: Fork | None) -> None:
        """Start it: forked, or with an interpreter of its own."""
        self.rank = rank
        self.connection, theirs = Pipe()
        # Shared with the rank, offset and all: so it appends.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)
        self._said: list[Any] = []
        self._outcome: Outcome | None = None
        with theirs:
            self.process = self._start(environment, fork, theirs.fileno())
        self.pidfd = os.pidfd_open(self.process.pid)  # a forked child may hold the connection open

    def _start(
        self, environment: Mapping[str, str], fork: Fork | None, theirs: int
    ) -> subprocess.Popen[bytes] | Forked:
        if fork:
            return fork(self.rank, environment, theirs, self._output.fileno())
        process = subprocess.Popen(
            [sys.executable, str(CHILD), "serves", str(theirs), str(os.getpid())],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
            start_new_session=True,
        )
        self._send(pickle.dumps(sys.path))
        return process

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.process.pid

    def _send(self, payload: bytes) -> None:
        with suppress(BrokenPipeError):  # it died: its outcome says so
            self.connection.send_bytes(payload)

    def give(self, payload: bytes, environment: Mapping[str, str] | None = None) -> None:
        """Start a case."""
        self._said, self._outcome = [], None
        self._send(pickle.dumps((dict(environment or {}), payload)))

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the rank's process alone."""
        self.process.send_signal(number)

    def output(self) -> str:
        """What the rank has written to stdout and stderr so far."""
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    def until_asleep(self, timeout_s: float = HANG_S) -> None:
        """Return when the rank's main thread sleeps in the kernel, as it does where it waits."""
        end = time.monotonic() + timeout_s
        times = 0
        while times < 5:  # not just for a moment, as at a lock
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            times = times + 1 if state == "S" else 0
            assert time.monotonic() < end, f"rank {self.rank} does not wait"
            time.sleep(0.005)

    def wait(self, timeout_s: float) -> bool:
        """Whether there is something to receive before the time-out."""
        return bool(wait([self.connection, self.pidfd], max(0.0, timeout_s)))

    def receive(self) -> None:
        """Take one message that is there, or the end of the process."""
        try:
            if not self.connection.poll():
                raise EOFError
            kind, value, trace, ended_at = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            exitcode = self.process.wait()
            self._outcome = Outcome("exited", ended_at=time.monotonic(), exitcode=exitcode)
            return
        if kind == "said":
            self._said.append(value)
        elif kind == "raised":
            self._outcome = Outcome(kind, error=value, traceback=trace, ended_at=ended_at)
        else:
            self._outcome = Outcome(kind, value=value, ended_at=ended_at)

    @property
    def failed(self) -> bool:
        """Whether the case has ended without a result."""
        return self._outcome is not None and self._outcome.kind != "returned"

    @property
    def idle(self) -> bool:
        """Whether the case has ended, as is known, and the process can take another one."""
        ended = self._outcome is not None and self._outcome.kind in ("returned", "raised")
        return ended and not self.connection.closed and self.process.poll() is None

    def heard(self, timeout_s: float = HANG_S) -> Any:
        """The next thing that the rank `say`s; fails if it ends or is silent instead."""
        end = time.monotonic() + timeout_s
        while not self._said:
            if self._outcome or not self.wait(end - time.monotonic()):
                raise RankFailure(
                    report([self], f"rank {self.rank} did not say anything"), [self.outcome(0)]
                )
            self.receive()
        return self._said.pop(0)

    def outcome(self, timeout_s: float = HANG_S) -> Outcome:
        """How the case ended, or "running" after the time-out."""
        end = time.monotonic() + timeout_s
        while self._outcome is None:
            if self.connection.closed or not self.wait(end - time.monotonic()):
                return Outcome("running")
            self.receive()
        return self._outcome

    def result(self, timeout_s: float = HANG_S) -> Any:
        """What the function returned; raises what it raised, or RankFailure."""
        outcome = self.outcome(timeout_s)
        if outcome.kind == "returned":
            return outcome.value
        if outcome.error is not None:
            raise outcome.error
        raise RankFailure(report([self], f"rank {self.rank} did not return"), [outcome])

    def finish(self, timeout_s: float = HANG_S) -> int | None:
        """Let the rank end by itself, as a script does; its exit code, None if it hangs."""
        if not self.connection.closed:
            self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    def left_processes(self) -> bool:
        """Whether processes that this rank started outlive it by more than a few seconds."""
        end = time.monotonic() + LEFT_S
        while time.monotonic() < end:
            with suppress(ChildProcessError):  # orphans come to the test process: see conftest
                os.waitpid(-self.pid, os.WNOHANG)
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return False
            time.sleep(0.01)
        return True

    def destroy(self) -> None:
        """Kill the rank with all of its session and give back what the test holds of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        os.close(self.pidfd)
        self._output.close()


def report(ranks: list[Rank], title: str) -> str:
    """Title, then outcome, traceback and output of each rank."""
    parts = [title]
    for rank in ranks:
        outcome = rank._outcome or Outcome("running")
        parts.append(f"----- rank {rank.rank}: {outcome.describe()}")
        parts += [text.rstrip() for text in (rank.output(), outcome.traceback) if text.strip()]
    return "\n".join(parts)
