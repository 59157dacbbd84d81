"""Runs the operations of a group that spans nodes, in order, in one thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from .. import _native
from ..errors import SdpError
from . import all_reduce as reductions
from . import broadcast as broadcasts
from . import gathers
from .call import Call, Here, Request, closed
from .notice import Notice, failure_fields
from .reduce_scatter import reduce_scatter
from .wire import WireError

Op = _native.Op
PROGRAMS: dict[_native.Op, Callable[[Call], None]] = {
    Op.all_reduce: reductions.all_reduce,
    Op.reduce: reductions.reduce,
    Op.reduce_scatter: reduce_scatter,
    Op.broadcast: broadcasts.broadcast,
    Op.barrier: broadcasts.barrier,
    Op.all_gather: gathers.all_gather,
    Op.gather: gathers.gather,
    Op.scatter: gathers.scatter,
    Op.all_to_all: gathers.all_to_all,
}
END_LIMIT_S = 5.0
MOST_KEPT_NBYTES = 64 * 2**20


class Engine:
    """One thread that calls the network, and nobody else does; starts with the first operation.

    It never ends silently: a failure goes to every queued work, to this node's ranks through the
    native group, and to the other nodes by a notice.
    """

    def __init__(self, here: Here) -> None:
        self._here = here
        self._queue: deque[tuple[Request, _native.Work]] = deque()
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._seq = 0
        self._notice: Notice | None = None
        self.abandoned = False
        """Whether messages were on their way when an operation failed."""

    def submit(self, request: Request) -> _native.Work:
        """Queue an operation."""
        work = _native.Work()
        with self._changed:
            if self._stopping:
                raise closed(self._here)
            self._start()
            self._queue.append((request, work))
            self._changed.notify()
        return work

    def tell(self, notice: Notice) -> None:
        """Have the other nodes told, by the thread that may use the network."""
        with self._changed:
            self._notice = self._notice or notice
            self._start()
            self._changed.notify()

    def close(self) -> None:
        """Fail what is queued and end the thread; the native group is closed before."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(END_LIMIT_S)
            self.abandoned = self.abandoned or thread.is_alive()

    def _start(self) -> None:
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._loop, name="sdp-internode", daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._stopping or self._notice):
                    self._changed.wait()
                notice, self._notice = self._notice, None
                if not self._queue and not notice:
                    return
                request, work = self._queue.popleft() if self._queue else (None, None)
            if notice:
                self._tell(notice)
            if request is None or work is None:
                continue
            failure = self._run(request)
            if failure is None:
                work.finish()
            else:
                work.fail(*failure_fields(failure))

    def _run(self, request: Request) -> SdpError | None:
        here = self._here
        known = here.native.failure()
        if isinstance(known, SdpError):
            return known
        self._seq += 1
        call = Call(here, request, self._seq)
        try:
            PROGRAMS[request.op](call)
        except BaseException as error:
            failure = self.fail(call, error)  # others are told first
            self.abandoned = call.abandon() or self.abandoned
            return failure
        here.last_completed = f"{call.op} #{call.seq}"
        for name in [n for n, pool in here.pools.items() if pool.nbytes > MOST_KEPT_NBYTES]:
            del here.pools[name]
        return None

    def fail(self, call: Call, error: BaseException) -> SdpError:
        """Fail the group, here and elsewhere; returns what an operation of it raises."""
        here = self._here
        if isinstance(error, SdpError):
            error.op, error.seq, error.elapsed_s = call.op, call.seq, call.elapsed_s
            failure = error
        else:
            failure = call.error(SdpError, f"{type(error).__name__}: {error}", [here.rank])
            failure.__cause__ = error
        already = here.native.failure()
        if not self._stopping:
            self._tell(Notice.of(here.rank, failure))
        if already is None:
            here.native.fail(*failure_fields(failure, "aborted"))
        return failure

    def _tell(self, notice: Notice) -> None:
        with suppress(WireError):  # whoever cannot be told finds out by himself
            if self._here.channel.told() is None:
                self._here.channel.tell(notice.pack())


def wait_uninterrupted(work: _native.Work, limit_s: float) -> None:
    """Wait until an operation has let go of its memory, whatever signals come."""
    end = time.monotonic() + limit_s
    while not work.completed() and time.monotonic() < end:
        time.sleep(0.002)
