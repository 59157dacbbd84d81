"""What the supervisor asks of a job's ranks, wherever they run."""

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
    """Where the ranks' output goes.

    Attributes:
        loop: Reads it.
        stdout: The launcher's.
        stderr: The launcher's.
        prefix: Whether every line starts with its rank.
    """

    loop: EventLoop
    stdout: Sink
    stderr: Sink
    prefix: bool

    def stream(self, rank: int, sink: Sink) -> Stream:
        """A rank's stdout or stderr on its way to a sink.

        A prefix takes the place of the one that torch puts before the lines of a traceback.
        """
        if not self.prefix:
            return self.loop.add_stream("", sink)
        return self.loop.add_stream(f"[rank {rank}] ", sink, f"[rank{rank}]: ")


@dataclass(frozen=True)
class StartContext:
    """What holds while ranks are started.

    Signals are blocked meanwhile, so that one that ends the job reaches every rank.

    Attributes:
        mask: The signals that were blocked before; the ranks take this mask over.
        is_over: Whether the job is to end already, so that no more ranks are worth starting.
    """

    mask: set[signal.Signals]
    is_over: Callable[[], bool]


@dataclass(frozen=True)
class LaunchFailure:
    """What ends a job besides its ranks.

    Attributes:
        text: One line.
        code: The launcher's exit code then.
    """

    text: str
    code: int = 1


class Rank(Protocol):
    """One rank."""

    @property
    def where(self) -> str:
        """Its process, for a report."""

    @property
    def started(self) -> bool:
        """Whether its program runs, or has run."""

    def exit_code(self) -> int | None:
        """128 + signal or exit status once it has ended."""

    def error(self) -> RankError | None:
        """The exception that ended it, once it has ended; None if it has told of none."""

    def send(self, number: int) -> None:
        """Send a signal; Ctrl-C reaches its children too."""


class WorkerGroup(Protocol):
    """All ranks of a job."""

    errors: dict[int, Stream]  # each rank's stderr

    @property
    def ranks(self) -> Sequence[Rank]:
        """In order."""

    def start(self, output: OutputSinks, context: StartContext) -> bool:
        """Start them, or begin to; False if it was over before that.

        Raises:
            OSError, subprocess.SubprocessError: They cannot be started.
        """

    def launch_failure(self) -> LaunchFailure | None:
        """Why the job cannot go on although no rank has failed; None if it can. Asked often."""

    def due(self) -> float | None:
        """When to look again at `launch_failure` and exit codes, on the monotonic clock."""

    def kill(self) -> None:
        """End all that is left of them, on every host; what they have written is still read."""

    def reap(self) -> None:
        """Let go of the processes and pipes."""
