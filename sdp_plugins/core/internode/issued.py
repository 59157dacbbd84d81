"""An operation between nodes, from its call to its end, with its handle and its record.

The native group records only what runs within a node.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from .. import _native
from ..errors import CollectiveTimeoutError, SdpError
from ..trace_event import ASYNC, FAILED, TraceEvent, unpack
from .failure_message import native_failure
from .operation import SpanningOperation


@dataclass(eq=False)
class IssuedOperation:
    """An operation that is queued or running.

    Attributes:
        operation: The operation.
        work: The caller's handle.
        issued_ns: Time of its call.
        started_ns: Time at which it began to run; 0: it has not begun.
        ticket: Its place in the flight recorder; 0: none yet.
    """

    operation: SpanningOperation
    work: _native.Work = field(default_factory=_native.Work)
    issued_ns: int = field(default_factory=time.monotonic_ns)
    started_ns: int = 0
    ticket: int = 0

    def __post_init__(self) -> None:
        self._show(self._event())

    def start(self) -> None:
        """Record that it begins to run in this thread."""
        self.started_ns = time.monotonic_ns()
        self._show(self._event())

    def finish(self, source: int = -1) -> None:
        """Complete it; `source` is the rank that has sent, for a receive."""
        event = self._ended_event()
        self._record_end(event if source < 0 else event._replace(peer=source))
        self.work.finish(source)

    def fail(self, failure: SdpError) -> None:
        """Fail it, because it or one before it has failed."""
        blamed = min(failure.ranks, default=-1)
        event = self._ended_event()._replace(flags=ASYNC | FAILED, blamed=blamed)
        if isinstance(failure, CollectiveTimeoutError):  # it waited until its end
            event = event._replace(arrived=event.finished, last_rank=blamed)
        self._record_end(event)
        token = self.operation.context.native.token
        self.work.fail(native_failure(failure, group=token))

    def _record_end(self, event: TraceEvent) -> None:
        self._show(event)
        native = self.operation.context.native
        if native.traced and self.started_ns:
            since, waiter = self.work.waiter()
            native.add_trace_event(event._replace(waited=since, waiter=waiter).pack())

    def _show(self, event: TraceEvent) -> None:
        self.ticket = self.operation.context.native.record(event.pack(), self.ticket)

    def _ended_event(self) -> TraceEvent:
        finished = time.monotonic_ns()
        return self._event()._replace(started=self.started_ns or finished, finished=finished)

    def _event(self) -> TraceEvent:
        (event,) = unpack(self.operation.request.trace_event())
        return event._replace(
            seq=self.operation.seq,
            issued=self.issued_ns,
            started=self.started_ns,
            thread=threading.get_native_id(),
            flags=ASYNC,
        )
