"""Hands a group's operations to its endpoint, and holds their memory until they are done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from weakref import ReferenceType, ref

from . import _native
from .buffers import Buffer
from .dtypes import DType, ReduceOp
from .endpoint import Endpoint
from .group_creation import Membership
from .open_groups import OpenGroup, open_groups
from .work import Work

NO_REDUCTION = ReduceOp.SUM


class Issuer:
    """Issues the operations of a group.

    Attributes:
        endpoint: Runs the operations.
        node: The native group of this node's ranks: the endpoint itself, if there are no others.
        release: Empties a list of what an operation has used, when that has ended. A network may
            not be done with it.
        timeout_s: Time-out of operations that give none, in seconds; may be changed.
    """

    def __init__(
        self, membership: Membership, timeout_s: float, group: ReferenceType[OpenGroup]
    ) -> None:
        self.endpoint = membership.endpoint
        self.node = membership.node
        self.release = membership.release
        self.timeout_s = timeout_s
        self._run = membership.endpoint.run
        self._rank = membership.info.rank
        self._group = group  # for the messages of handles
        # What asynchronous operations may still read or write. The lock is re-entrant: a signal
        # handler or a finalizer may issue operations too.
        self._in_flight: deque[tuple[_native.Request, list[Buffer]]] = deque()
        self._lock = threading.RLock()

    # ---- describing an operation ---------------------------------------------------------------

    def in_place(
        self,
        op: _native.Op,
        buffer: Buffer,
        timeout_s: float | None,
        reduction: ReduceOp = NO_REDUCTION,
        root: int = -1,
    ) -> _native.Request:
        """Describe a collective on one buffer."""
        request = _native.Request(
            op,
            buffer.dtype.native,
            (),
            ((buffer.ptr, buffer.count),),
            self.timeout_s if timeout_s is None else timeout_s,
            reduction.native,
            root,
        )
        if reduction.factor != 1.0:
            request.factor = reduction.factor
        return request

    def collective(
        self,
        op: _native.Op,
        sends: Sequence[Buffer],
        recvs: Sequence[Buffer],
        timeout_s: float | None,
        reduction: ReduceOp = NO_REDUCTION,
        root: int = -1,
    ) -> tuple[_native.Request, Sequence[Buffer]]:
        """Describe a collective with inputs and outputs.

        Returns:
            The request, and all buffers that it uses: an input that lies in the memory of outputs
            is copied.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        dtype = _common_dtype(op, sends, recvs)
        request = _native.Request(
            op, dtype.native, _pieces(sends), _pieces(recvs), limit_s, reduction.native, root
        )
        if reduction.factor != 1.0:
            request.factor = reduction.factor
        if sends and (aliased := request.aliased_inputs(self._rank)):
            sends = [part.copied() if i in aliased else part for i, part in enumerate(sends)]
            request.sends = _pieces(sends)
        return request, (*sends, *recvs)

    def message(
        self, op: _native.Op, buffer: Buffer, peer: int, tag: int, timeout_s: float | None
    ) -> _native.Request:
        """Describe a send or a receive."""
        if not 0 <= tag < 2**32:
            raise ValueError(f"{op.name}: tag {tag} is not between 0 and 2^32 - 1")
        sends, recvs = _pieces([buffer]), ()
        if op is _native.Op.recv:
            sends, recvs = recvs, sends
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        request = _native.Request(op, buffer.dtype.native, sends, recvs, limit_s)
        request.peer, request.tag = peer, tag
        return request

    # ---- issuing it ----------------------------------------------------------------------------

    def issue(
        self, request: _native.Request, buffers: Sequence[Buffer], async_op: bool
    ) -> Work | None:
        """Run a collective, or queue it."""
        if async_op:
            return self.submit(request, buffers)
        if self._in_flight:
            self._release_done()
        try:
            self._run(request)
        except BaseException:
            self.release([*buffers])
            open_groups.operation_failed()
            raise
        return None

    def submit(
        self,
        request: _native.Request,
        buffers: Sequence[Buffer],
        flags: Sequence[tuple[int, int, int]] | None = None,
    ) -> Work:
        """Start an operation; hold its memory until it is done, even if the handle is dropped.

        Args:
            request: The operation.
            buffers: What it uses.
            flags: Of each piece of memory, where a device starts it.
        """
        held = list(buffers)
        self._release_done()
        # Before it starts: a signal handler may raise as soon as it has. Without the lock, which
        # may be held for ever in a forked child.
        self._in_flight.append((request, held))
        try:
            if flags is None:
                native = self.endpoint.submit(request)
            else:
                native = self.node.submit_at_flags(request, flags)
        except BaseException:
            if request.work is None:  # it has not started
                request.work = done = _native.Work()
                done.finish()
            raise
        return self.handle(native, request.op.name, held)

    def handle(self, native: _native.Work, what: str, held: list[Buffer] | None = None) -> Work:
        """Return the handle of an operation that is under way.

        Args:
            native: Completed by whoever runs the operation.
            what: Its name, for messages.
            held: What it uses, held by the group as well.
        """
        return Work(native, what, [] if held is None else held, self.release, self._group)

    def _release_done(self) -> None:
        """Look at operations in flight, in turns, until two have been met that are not done."""
        done: list[list[Buffer]] = []
        # Another time will do; and in a forked child it may be held for ever.
        if not self._lock.acquire(blocking=False):
            return
        try:
            pending: list[tuple[_native.Request, list[Buffer]]] = []
            while self._in_flight and len(pending) < 2:
                request, held = entry = self._in_flight.popleft()
                is_done = request.work is not None and request.work.completed()
                done.append(held) if is_done else pending.append(entry)
            self._in_flight.extend(pending)
        finally:
            self._lock.release()
        for held in done:  # outside of the lock: finalizers are not ours
            self.release(held)

    def close(self) -> None:
        """Fail what is pending, leave the group, and give up the memory of all operations."""
        self.endpoint.close()
        while self._in_flight:  # perhaps at the interpreter's end, when no module is left
            self.release(self._in_flight.popleft()[1])

    # ---- for native code that issues operations ------------------------------------------------

    @property
    def submit_across_nodes(self) -> Callable[[_native.Request], _native.Work] | None:
        """Takes operations that are not for the ranks of this node alone; None: all are."""
        return None if self.endpoint is self.node else self.endpoint.submit

    @cached_property
    def sdp_endpoint(self) -> int:
        """Address of the group's ``SdpEndpoint``, which holds nothing of it."""
        if self.endpoint is self.node:
            return self.node.endpoint()
        return _native.make_endpoint(_weak_submit(ref(self.endpoint)))


def _weak_submit(
    endpoint: ReferenceType[Endpoint],
) -> Callable[[_native.Request], _native.Work]:
    def submit(request: _native.Request) -> _native.Work:
        held = endpoint()
        if held is None:
            raise RuntimeError("the group is closed. Hint: make a new group.")
        return held.submit(request)

    return submit


def _pieces(buffers: Sequence[Buffer]) -> Sequence[tuple[int, int]]:
    return [(buffer.ptr, buffer.count) for buffer in buffers]


def _common_dtype(op: _native.Op, sends: Sequence[Buffer], recvs: Sequence[Buffer]) -> DType:
    if not (buffers := (*sends, *recvs)):
        return DType.uint8
    first = buffers[0].dtype
    for buffer in buffers:
        if buffer.dtype is not first:  # no set of types: the hash of an enumeration is slow
            names = ", ".join(sorted({buffer.dtype.value for buffer in buffers}))
            raise TypeError(f"{op.name}: all buffers must have one element type, got {names}")
    return first
