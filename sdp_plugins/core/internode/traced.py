"""Events of operations that the native group does not run: those among nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from .. import _native
from ..trace.events import ASYNC, FAILED, Event
from .call import Here, Request


def record(
    here: Here,
    request: Request,
    seq: int,
    times: tuple[int, int],
    work: _native.Work,
    blamed: Sequence[int] | None = None,
) -> None:
    """Record an operation that ends now, in this thread, if the group is traced.

    Args:
        here: The group.
        request: What it was.
        seq: Its number.
        times: When it was issued, and when it started; 0: it did not.
        work: Its handle.
        blamed: Who is to blame if it has failed; None: it has not.
    """
    if not here.native.traced or not times[0]:
        return
    finished = time.monotonic_ns()
    issued, started = times
    since, waiter = work.waiter()
    event = Event(
        seq=seq,
        issued=issued,
        started=started or finished,
        arrived=0,
        finished=finished,
        waited=since,
        elems=request.count,
        nbytes=_nbytes(request),
        last_rank=min(blamed, default=-1) if blamed is not None else -1,
        peer=request.peer if request.peer >= 0 else request.root,
        thread=threading.get_native_id(),
        waiter=waiter,
        tag=request.tag,
        layout=request.layout,
        op=request.op.value,
        dtype=request.dtype.value,
        reduce_op=request.reduce_op.value,
        flags=ASYNC | (FAILED if blamed is not None else 0),
        path=0,
    )
    here.native.add_trace_event(event.pack())


def _nbytes(request: Request) -> int:
    counts = (sum(count for _, count in pieces) for pieces in (request.sends, request.recvs))
    return max(counts) * _native.itemsize(request.dtype)
