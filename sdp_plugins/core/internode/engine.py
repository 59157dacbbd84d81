"""Runs the operations of a group across nodes, in order, in one thread."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from .. import _native
from ..errors import SdpError, name_error
from . import gathers
from .agreement import agree, await_leader
from .all_reduce import all_reduce
from .broadcast import broadcast
from .failure_message import FailureMessage, native_failure
from .group_context import GroupContext
from .issued import IssuedOperation
from .leaked import abandon
from .operation import SpanningOperation
from .reduce_scatter import reduce_scatter

Op = _native.Op
PROGRAMS: dict[_native.Op, Callable[[SpanningOperation], None]] = {
    Op.all_reduce: all_reduce,
    Op.reduce: all_reduce,
    Op.reduce_scatter: reduce_scatter,
    Op.broadcast: broadcast,
    Op.barrier: await_leader,  # which arrives after it has heard from all nodes
    Op.all_gather: gathers.all_gather,
    Op.gather: gathers.gather,
    Op.scatter: gathers.scatter,
    Op.all_to_all: gathers.all_to_all,
}
END_LIMIT_S = 5.0
MOST_KEPT_NBYTES = 256 * 2**20


class SpanningEngine:
    """Runs the collectives in a thread of its own, which starts with the first operation.

    Only this thread calls the network for collectives. It never ends silently: a failure goes to
    every queued work, to this node's ranks through the native group, and to the other nodes by a
    message. A second failure meanwhile, such as MPI's when a rank is gone, changes nothing for the
    callers: they receive the first cause.
    """

    def __init__(self, context: GroupContext) -> None:
        self._context = context
        self._queue: deque[IssuedOperation] = deque()
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._issued = 0
        self._message: FailureMessage | None = None
        self._failure: SdpError | None = None  # the first that this rank detected
        self._telling = threading.Lock()
        self._has_told = False
        self.abandoned = False
        """Whether messages were in flight when an operation failed."""

    @property
    def issued(self) -> int:
        """Number of operations issued so far."""
        return self._issued

    def submit(self, request: _native.Request) -> _native.Work:
        """Queue an operation."""
        with self._changed:
            if self._stopping:
                raise self._context.closed_error()
            self._start()
            self._issued += 1
            task = IssuedOperation(SpanningOperation(self._context, request, self._issued))
            request.work = task.work
            self._queue.append(task)
            self._changed.notify()
        return task.work

    def send_failure(self, message: FailureMessage) -> None:
        """Have the engine's thread, which may use the network, send a message to other nodes."""
        with self._changed:
            self._message = self._message or message
            self._start()
            self._changed.notify()

    def tell_failure(self) -> None:
        """Have the other nodes told why the group has failed, unless they were told."""
        known = self._context.native.failure()
        if isinstance(known, SdpError) and not self._has_told:
            self.send_failure(FailureMessage.of(known, self._context))

    def close(self) -> None:
        """Fail the queued operations and end the thread; the native group is closed already."""
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
                while not (self._queue or self._stopping or self._message):
                    self._changed.wait()
                message, self._message = self._message, None
                task = self._queue.popleft() if self._queue and not message else None
                if task is None and message is None:
                    return
            if message is not None:
                self._send_failure(message)
            elif task is not None:
                self._run_or_fail(task)
                task = None  # its memory is the caller's

    def _run_or_fail(self, task: IssuedOperation) -> None:
        known = self._failure or self._context.native.failure()
        if isinstance(known, SdpError):
            task.fail(known)
            return
        try:
            self._run(task)
        except BaseException as error:
            self._fail_task(task, error)

    def _fail_task(self, task: IssuedOperation, error: BaseException) -> None:
        """Fail the group and a task, from a frame that is not in the error's traceback."""
        failure = self.fail(task.operation, error)  # tells the other ranks first
        # The traceback holds the memory of the steps that failed.
        memory = (*self._context.pools.values(), task.operation, error)
        self.abandoned = abandon(task.operation.abandon, *memory) or self.abandoned
        task.fail(failure)

    def _run(self, task: IssuedOperation) -> None:
        operation = task.operation
        task.start()
        agree(operation)
        PROGRAMS[operation.request.op](operation)
        operation.end()
        self._context.last_completed = operation.signature
        task.finish()
        self._context.trim(MOST_KEPT_NBYTES)

    def fail(self, operation: SpanningOperation, error: BaseException) -> SdpError:
        """Fail the group on all nodes; returns the error for the operation's caller.

        Never raises: a second error would hide the cause from the callers.
        """
        failure = self._explained(operation, error)
        self._failure = self._failure or copy.copy(failure)  # without frames, which hold this group
        with suppress(BaseException):
            already = self._context.native.failed
            if not self._stopping:
                self._send_failure(FailureMessage.of(failure, self._context))
            if not already:
                self._context.native.fail(native_failure(failure, "aborted"))
        return failure

    def _explained(self, operation: SpanningOperation, error: BaseException) -> SdpError:
        """Convert an error into the one that the operation's caller receives."""
        if isinstance(error, SdpError):
            error.op, error.seq = operation.name, operation.seq
            error.elapsed_s = operation.deadlines.elapsed_s
            return error
        failure = operation.error(SdpError, name_error(error), [self._context.rank])
        failure.__cause__ = error
        return failure

    def _send_failure(self, message: FailureMessage) -> None:
        """Send a message to the other nodes; ranks that it does not reach detect the failure."""
        with self._telling, suppress(BaseException):  # MPI raises for ranks that are gone
            if not self._has_told and self._context.channel.received_failure() is None:
                self._context.channel.send_failure(message.pack())
                self._has_told = True


def wait_uninterrupted(work: _native.Work, limit_s: float) -> None:
    """Wait until an operation is done with its memory, at most `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while not work.completed() and time.monotonic() < end:
        time.sleep(0.002)
