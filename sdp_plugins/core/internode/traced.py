"""Records the operations that run between nodes, outside of the native group."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from .. import _native
from ..errors import CollectiveTimeoutError, SdpError
from ..trace_event import ASYNC, FAILED, TraceEvent, unpack
from .context import GroupContext


@dataclass(eq=False)
class Track:
    """The record of one operation, from its call to its end.

    Attributes:
        context: The group.
        request: The operation's description.
        seq: The operation's number.
        issued_ns: Time of its call.
        started_ns: Time at which it began to run; 0: it has not begun.
        ticket: Its place in the flight recorder; 0: none yet.
    """

    context: GroupContext
    request: _native.Request
    seq: int
    issued_ns: int = field(default_factory=time.monotonic_ns)
    started_ns: int = 0
    ticket: int = 0

    def __post_init__(self) -> None:
        self._show(self._event())

    def start(self) -> None:
        """Record that it begins to run in this thread."""
        self.started_ns = time.monotonic_ns()
        self._show(self._event())

    def end(self, work: _native.Work, failure: SdpError | None = None, source: int = -1) -> None:
        """Record that it has ended in this thread.

        Args:
            work: Its handle.
            failure: Its failure; None: it has succeeded.
            source: The rank that has sent, for a receive from any rank.
        """
        event = self._ended(failure)
        if source >= 0:
            event = event._replace(peer=source)
        self._show(event)
        if self.context.native.traced and self.started_ns:
            since, waiter = work.waiter()
            self.context.native.add_trace_event(event._replace(waited=since, waiter=waiter).pack())

    def _show(self, event: TraceEvent) -> None:
        self.ticket = self.context.native.record(event.pack(), self.ticket)

    def _ended(self, failure: SdpError | None) -> TraceEvent:
        finished = time.monotonic_ns()
        event = self._event()._replace(started=self.started_ns or finished, finished=finished)
        if failure is None:
            return event
        blamed = min(failure.ranks, default=-1)
        event = event._replace(flags=ASYNC | FAILED, blamed=blamed)
        if isinstance(failure, CollectiveTimeoutError):  # it waited until its end
            event = event._replace(arrived=finished, last_rank=blamed)
        return event

    def _event(self) -> TraceEvent:
        (event,) = unpack(self.request.trace_event())
        return event._replace(
            seq=self.seq,
            issued=self.issued_ns,
            started=self.started_ns,
            thread=threading.get_native_id(),
            flags=ASYNC,
        )
