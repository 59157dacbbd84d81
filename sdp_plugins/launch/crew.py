"""What the supervisor asks of a job's ranks, wherever they run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sdp_plugins.launch.output import Sink, Stream
from sdp_plugins.launch.pump import Pump


@dataclass(frozen=True)
class Outlets:
    """Where the ranks' output goes.

    Attributes:
        pump: Reads it.
        stdout: The launcher's.
        stderr: The launcher's.
        prefix: Whether every line starts with its rank.
    """

    pump: Pump
    stdout: Sink
    stderr: Sink
    prefix: bool

    def label(self, rank: int) -> str:
        """What a rank's lines start with."""
        return f"[rank {rank}] " if self.prefix else ""


@dataclass(frozen=True)
class Beginning:
    """While ranks are started, signals are held back: so one that ends the job reaches all.

    Attributes:
        mask: The signals that were held back before, for the ranks to take over.
        is_over: Whether the job is to end already, so that no more ranks are worth starting.
    """

    mask: set[signal.Signals]
    is_over: Callable[[], bool]


@dataclass(frozen=True)
class Trouble:
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

    def send(self, number: int) -> None:
        """Send a signal; Ctrl-C reaches its children too."""


class Crew(Protocol):
    """All ranks of a job."""

    errors: dict[int, Stream]  # each rank's stderr

    @property
    def ranks(self) -> Sequence[Rank]:
        """In order."""

    def start(self, outlets: Outlets, beginning: Beginning) -> bool:
        """Start them, or begin to; False if it was over before that.

        Raises:
            OSError, subprocess.SubprocessError: They cannot be started.
        """

    def trouble(self) -> Trouble | None:
        """Why the job cannot go on although no rank has failed; None if it can. Asked often."""

    def due(self) -> float | None:
        """When to look again at `trouble` and exit codes, on the monotonic clock."""

    def kill(self) -> None:
        """End all that is left of them, on every host; what they have written is still read."""

    def reap(self) -> None:
        """Let go of the processes and pipes."""
