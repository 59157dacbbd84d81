"""What is recorded of an operation, as the native ``TraceEvent`` lays it out."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from .. import _native

FAILED, ASYNC, STEP, COMPARE = 1, 2, 4, 8
_LAYOUT = struct.Struct("<QqqqqqQQiiiIIIIBBBBB7x")
NBYTES = _LAYOUT.size


class Event(NamedTuple):
    """One operation on this rank; times in nanoseconds of CLOCK_MONOTONIC, 0 where not known.

    Attributes:
        seq: Its number in the group; of a send or a receive, in this process.
        issued: When it was called.
        started: When it began to run; of a send or a receive, to move; 0: it has not.
        arrived: Until when it waited for ranks of this node to come.
        finished: When it was done here; 0: it is not.
        waited: Since when a caller has waited for it.
        elems: Elements, as messages say them.
        nbytes: Bytes that this rank shows or takes, whichever is more.
        last_rank: Who was waited for: who came last, or did not; -1: not known.
        blamed: Of a failed operation, who is to blame first; -1: nobody.
        peer: Rank or root; -1: none.
        thread: That ran it.
        waiter: The thread that waited.
        tag: Of a send or a receive.
        layout: Of a fusion buffer; 0: it is none.
        op: Number of the native ``Op``.
        dtype: As well.
        reduce_op: As well.
        flags: Of ``FAILED``, ``ASYNC``, ``STEP``, ``COMPARE``.
        path: Number of the native path.
    """

    seq: int
    issued: int
    started: int
    arrived: int
    finished: int
    waited: int
    elems: int
    nbytes: int
    last_rank: int
    blamed: int
    peer: int
    thread: int
    waiter: int
    tag: int
    layout: int
    op: int
    dtype: int
    reduce_op: int
    flags: int
    path: int

    def pack(self) -> bytes:
        """As the native module takes it."""
        return _LAYOUT.pack(*self)

    @property
    def name(self) -> str:
        """Of the operation."""
        return _native.Op(self.op).name

    @property
    def shape(self) -> str:
        """Such as ``float32[1024]``; empty where nothing is moved."""
        return f"{_native.DType(self.dtype).name}[{self.elems}]" if self.nbytes else ""

    @property
    def between_two(self) -> bool:
        """Whether it is a send or a receive."""
        return self.op in (_native.Op.send.value, _native.Op.recv.value)


def unpack(packed: bytes) -> Iterator[Event]:
    """The events that a native group has recorded."""
    return map(Event._make, _LAYOUT.iter_unpack(packed))
