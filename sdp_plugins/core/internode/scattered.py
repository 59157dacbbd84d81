"""A buffer whose elements lie in several pieces of memory, one behind the other."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from .operation import Operation, Piece


class Scattered:
    """The pieces of a request as one run of elements.

    Args:
        pieces: Addresses and numbers of elements.
        itemsize: Bytes of an element.
    """

    def __init__(self, pieces: Sequence[Piece], itemsize: int) -> None:
        self._pieces = pieces
        self._itemsize = itemsize
        self._ends = list(accumulate(count for _, count in pieces))

    def flat(
        self, operation: Operation, scratch: str, begin: int, count: int, *, copy: bool = False
    ) -> int:
        """Address of elements one behind the other: where they lie if they do, else a copy.

        Args:
            operation: Lends the memory for a copy.
            scratch: Name of that memory.
            begin: First element.
            count: Number of elements.
            copy: Copy in any case.
        """
        runs = list(self._runs(begin, count))
        if len(runs) == 1 and not copy:
            return runs[0][0]
        target = operation.context.scratch(scratch, count * self._itemsize)
        at = target
        for address, nbytes in runs:
            ctypes.memmove(at, address, nbytes)
            at += nbytes
        return target

    def write(self, begin: int, count: int, source: int) -> None:
        """Copy elements to where they belong, unless they are there."""
        for address, nbytes in self._runs(begin, count):
            if address != source:
                ctypes.memmove(address, source, nbytes)
            source += nbytes

    def _runs(self, begin: int, count: int) -> Iterator[tuple[int, int]]:
        """Addresses and lengths in bytes."""
        piece = bisect_right(self._ends, begin)
        while count > 0:
            address, length = self._pieces[piece]
            skip = begin - (self._ends[piece] - length)
            n = min(length - skip, count)
            if n > 0:
                yield address + skip * self._itemsize, n * self._itemsize
            begin, count, piece = begin + n, count - n, piece + 1
