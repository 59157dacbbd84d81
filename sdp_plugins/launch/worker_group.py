"""The interface between the supervisor and the ranks of a job, on any machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sdp_plugins.core.error_file import RankError
from sdp_plugins.launch.event_loop import EventLoop
from sdp_plugins.launch.output import OutputStream


class RankOutput(NamedTuple):
    """The streams of a rank's output."""

    stdout: OutputStream
    stderr: OutputStream


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


class WorkerGroup(ABC):
    """All ranks of a job.

    Attributes:
        world_size: Their number.
        ranks: In order; complete once all have been started.
    """

    world_size: int
    ranks: Sequence[Rank]

    @abstractmethod
    def start(
        self,
        loop: EventLoop,
        output: Sequence[RankOutput],
        mask: Iterable[int],
        is_over: Callable[[], bool],
    ) -> bool:
        """Start all ranks, or begin to.

        Signals are blocked meanwhile, so that a signal that ends the job reaches every rank.

        Args:
            loop: Reads the output.
            output: Destination of each rank's output.
            mask: The signals that were blocked before; the ranks restore this mask.
            is_over: Whether the job must end already, so that no more ranks are started.

        Returns:
            False if the job ended before all ranks were started.

        Raises:
            OSError, subprocess.SubprocessError: The ranks cannot be started.
        """

    def note_losses(self) -> None:
        """Give an exit code to ranks that can no longer report one; by default, all can."""
        return

    def launch_failure(self) -> Ending | None:
        """Why the job cannot continue although no rank has failed; None if it can."""
        return None

    def due(self) -> float | None:
        """When to look for losses, failures and exit codes again, on the monotonic clock.

        By default never, because the end of a child is a signal.
        """
        return None

    def resize(self) -> None:
        """Let the ranks know that the launcher's terminal has another size."""
        return

    @abstractmethod
    def kill(self) -> None:
        """End all remaining processes on every host; their output can still be read."""

    @abstractmethod
    def reap(self) -> None:
        """Reap the processes and close the pipes."""
