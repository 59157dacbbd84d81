"""One recorded operation, in the layout of the native ``TraceEvent``."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from . import _native

FAILED, ASYNC, STEP, COMPARE = 1, 2, 4, 8
_LAYOUT = struct.Struct("<QqqqqqQQiiiIIIIBBBBB7x")
NBYTES = _LAYOUT.size


class TraceEvent(NamedTuple):
    """One operation on this rank; times in nanoseconds of CLOCK_MONOTONIC, 0 if unknown.

    Attributes:
        seq: The operation's number in the group; of a send or a receive, in this process.
        issued: When it was called.
        started: When it began to run; of a send or a receive, when data began to move.
        arrived: Until when it waited for other ranks of this node to arrive.
        finished: When it completed on this rank.
        waited: Since when a caller has waited for it.
        elems: Number of elements, as error messages count them.
        nbytes: Bytes that this rank sends or receives, whichever is more.
        last_rank: The rank that arrived last, or did not arrive; -1 if unknown.
        blamed: The first rank to blame for a failure; -1: none.
        peer: Peer or root; -1: none.
        thread: Id of the thread that ran it.
        waiter: Id of the thread that waited.
        tag: Tag of a send or a receive.
        layout: Layout hash of a fusion buffer; 0 for other operations.
        op: Number of the native ``Op``.
        dtype: Number of the native ``DType``.
        reduce_op: Number of the native ``ReduceOp``.
        flags: ``FAILED``, ``ASYNC``, ``STEP`` and ``COMPARE``, combined.
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
        """The native layout."""
        return _LAYOUT.pack(*self)

    @property
    def name(self) -> str:
        """The operation's name."""
        return _native.Op(self.op).name

    @property
    def shape(self) -> str:
        """Type and size, such as ``float32[1024]``; empty if nothing is moved."""
        return f"{_native.DType(self.dtype).name}[{self.elems}]" if self.nbytes else ""

    @property
    def between_two(self) -> bool:
        """Whether it is a send or a receive."""
        return self.op in (_native.Op.send.value, _native.Op.recv.value)


def unpack(packed: bytes) -> Iterator[TraceEvent]:
    """The events that a native group has recorded."""
    return map(TraceEvent._make, _LAYOUT.iter_unpack(packed))
