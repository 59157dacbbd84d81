"""Events of operations that the native group does not run: those among nodes."""

from __future__ import annotations

import threading
import time

from .. import _native
from ..errors import CollectiveTimeoutError, SdpError
from ..trace.events import ASYNC, FAILED, Event
from .call import Here, Request


def record(
    here: Here,
    request: Request,
    seq: int,
    times: tuple[int, int],
    work: _native.Work,
    failure: SdpError | None = None,
) -> None:
    """Record an operation that ends now, in this thread, if the group is traced.

    Args:
        here: The group.
        request: What it was.
        seq: Its number.
        times: When it was issued, and when it started; 0: it did not.
        work: Its handle.
        failure: Why it has failed; None: it has not.
    """
    if not here.native.traced or not times[0]:
        return
    finished = time.monotonic_ns()
    issued, started = times
    since, waiter = work.waiter()
    blamed = -1 if failure is None else min(failure.ranks, default=-1)
    waited_in_vain = isinstance(failure, CollectiveTimeoutError)
    event = Event(
        seq=seq,
        issued=issued,
        started=started or finished,
        arrived=finished if waited_in_vain else 0,
        finished=finished,
        waited=since,
        elems=request.count,
        nbytes=_nbytes(request),
        last_rank=blamed if waited_in_vain else -1,
        blamed=blamed,
        peer=request.peer if request.peer >= 0 else request.root,
        thread=threading.get_native_id(),
        waiter=waiter,
        tag=request.tag,
        layout=request.layout,
        op=request.op.value,
        dtype=request.dtype.value,
        reduce_op=request.reduce_op.value,
        flags=ASYNC | (FAILED if failure is not None else 0),
        path=0,
    )
    here.native.add_trace_event(event.pack())


def _nbytes(request: Request) -> int:
    counts = (sum(count for _, count in pieces) for pieces in (request.sends, request.recvs))
    return max(counts) * _native.itemsize(request.dtype)
