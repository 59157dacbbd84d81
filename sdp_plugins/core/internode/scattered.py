"""A buffer whose elements lie in a sequence of separate pieces of memory."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from .operation import Piece, SpanningOperation


class Scattered:
    """The pieces of a request as one sequence of elements."""

    def __init__(self, pieces: Sequence[Piece], itemsize: int) -> None:
        self._pieces = pieces
        self._itemsize = itemsize
        self._ends = list(accumulate(count for _, count in pieces))

    def flat(
        self,
        operation: SpanningOperation,
        scratch: str,
        begin: int,
        count: int,
        *,
        copy: bool = False,
    ) -> int:
        """Return the address of contiguous elements: in place if possible, else of a copy.

        A copy, which `copy` makes in any case, is in scratch memory of this name.
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
        """Copy elements from `source` to their pieces, except those already in place."""
        for address, nbytes in self._runs(begin, count):
            if address != source:
                ctypes.memmove(address, source, nbytes)
            source += nbytes

    def _runs(self, begin: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield the address and the length in bytes of each contiguous run."""
        piece = bisect_right(self._ends, begin)
        while count > 0:
            address, length = self._pieces[piece]
            skip = begin - (self._ends[piece] - length)
            n = min(length - skip, count)
            if n > 0:
                yield address + skip * self._itemsize, n * self._itemsize
            begin, count, piece = begin + n, count - n, piece + 1
