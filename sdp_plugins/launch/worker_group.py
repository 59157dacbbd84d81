"""The interface between the supervisor and the ranks of a job, on any machine."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sdp_plugins.launch.error_file import RankError
from sdp_plugins.launch.event_loop import EventLoop
from sdp_plugins.launch.output import Sink, Stream


@dataclass(frozen=True)
class OutputSinks:
    """Destination of the ranks' output.

    Attributes:
        loop: Reads the output.
        stdout: The launcher's stdout.
        stderr: The launcher's stderr.
        prefix: Whether every line begins with its rank.
    """

    loop: EventLoop
    stdout: Sink
    stderr: Sink
    prefix: bool

    def stream(self, rank: int, sink: Sink) -> Stream:
        """Make the stream of a rank's stdout or stderr.

        The prefix replaces the one that torch puts before the lines of a traceback.
        """
        if not self.prefix:
            return self.loop.add_stream("", sink)
        return self.loop.add_stream(f"[rank {rank}] ", sink, f"[rank{rank}]: ")


@dataclass(frozen=True)
class StartContext:
    """Conditions while ranks are started.

    Signals are blocked meanwhile, so that a signal that ends the job reaches every rank.

    Attributes:
        mask: The signals that were blocked before; the ranks restore this mask.
        is_over: Whether the job must end already, so that no more ranks are started.
    """

    mask: set[signal.Signals]
    is_over: Callable[[], bool]


@dataclass(frozen=True)
class Ending:
    """Why a job has ended.

    Attributes:
        text: For the user; empty: everything has been said.
        code: The launcher's exit code.
    """

    text: str
    code: int = 1


class Rank(Protocol):
    """One rank."""

    @property
    def where(self) -> str:
        """Description of its process, for reports."""

    @property
    def started(self) -> bool:
        """Whether its program has been started."""

    def exit_code(self) -> int | None:
        """128 + signal, or the exit status, once it has ended; None before."""

    def error(self) -> RankError | None:
        """The exception that ended it, once it has ended; None if it reported none."""

    def send(self, number: int) -> None:
        """Send a signal; SIGINT also goes to its children."""


class WorkerGroup(Protocol):
    """All ranks of a job."""

    errors: dict[int, Stream]  # each rank's stderr

    @property
    def ranks(self) -> Sequence[Rank]:
        """In order."""

    def start(self, output: OutputSinks, context: StartContext) -> bool:
        """Start all ranks, or begin to; False if the job ended before.

        Raises:
            OSError, subprocess.SubprocessError: The ranks cannot be started.
        """

    def note_losses(self) -> None:
        """Give an exit code to ranks that can no longer report one."""

    def launch_failure(self) -> Ending | None:
        """Why the job cannot continue although no rank has failed; None if it can."""

    def due(self) -> float | None:
        """When to look for losses, failures and exit codes again, on the monotonic clock."""

    def kill(self) -> None:
        """End all remaining processes on every host; their output can still be read."""

    def reap(self) -> None:
        """Reap the processes and close the pipes."""
