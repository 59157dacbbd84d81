"""What a library must offer to be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from numpy.typing import NDArray


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    Attributes:
        rank: 0 to ranks - 1.
        ranks: How many there are.
        threads: Threads that a rank may compute with.
        meeting_file: Path that the job's ranks can meet at (a file store).
        shared_fd: An empty memory file that all ranks of the job hold, -1 if mpiexec started them.
    """

    rank: int
    ranks: int
    threads: int
    meeting_file: str
    shared_fd: int = -1


class UnsupportedError(Exception):
    """The library cannot do this combination; the row is left out."""


class Library(Protocol):
    """One library in one rank; the constructor takes a Place and options and joins the group.

    Everything is called on all ranks in the same order.

    Attributes:
        reduces: False if the buffer does not hold a sum after all_reduce.
        version: Of the library, for the report.
    """

    reduces: bool
    version: str

    def allocate(self, count: int, dtype: str) -> None:
        """Take a buffer of `count` elements in place of the former one; raises UnsupportedError."""

    def view(self) -> NDArray:
        """The buffer as it lies now. Ask again after every operation: zero-copy may move it."""

    def operation(self, name: str) -> Callable[[], object]:
        """What the timed loop calls: all_reduce of the buffer, or barrier.

        Raises:
            UnsupportedError: The library has no such operation.
        """

    def path(self) -> str:
        """How the last operation travelled, if the library can say so."""

    def close(self) -> None:
        """Leave the group."""
