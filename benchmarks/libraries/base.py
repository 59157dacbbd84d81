"""The interface that a library must implement to be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from numpy.typing import NDArray


@dataclass(frozen=True)
class Place:
    """A rank's position.

    Attributes:
        rank: 0 to ranks - 1.
        ranks: Number of ranks.
        threads: Number of threads that a rank may compute with.
        meeting_file: Path of a file store at which the job's ranks can meet.
        shared_fd: An empty memory file that all ranks of the job share; -1 if mpiexec started them.
    """

    rank: int
    ranks: int
    threads: int
    meeting_file: str
    shared_fd: int = -1


class UnsupportedError(Exception):
    """The library does not support this combination; the table omits the row."""


class Library(Protocol):
    """One library in one rank; the constructor takes a Place and options and joins the group.

    All methods are called on all ranks in the same order.

    Attributes:
        reduces: False if the buffer does not hold a sum after all_reduce.
        version: The library's version, for the report.
    """

    reduces: bool
    version: str

    def allocate(self, count: int, dtype: str) -> None:
        """Replace the buffer by one of `count` elements; raises UnsupportedError."""

    def view(self) -> NDArray:
        """Return the current buffer, to be read again after each call: zero-copy may move it."""

    def operation(self, name: str) -> Callable[[], object]:
        """Return the function to time: all_reduce of the buffer, or barrier.

        Raises:
            UnsupportedError: The library has no such operation.
        """

    def path(self) -> str:
        """Return the path of the last operation, if the library reports it."""

    def close(self) -> None:
        """Leave the group."""
