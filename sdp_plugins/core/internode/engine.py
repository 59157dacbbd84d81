"""Runs the operations of a group across nodes, in order, in one thread."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from .. import _native
from ..errors import SdpError, name_error
from . import all_reduce as reductions
from . import broadcast as broadcasts
from . import gathers
from .agreement import Agreement, all_agree
from .context import GroupContext
from .failure_message import FailureMessage, native_failure
from .leaked import abandon
from .operation import Operation
from .reduce_scatter import reduce_scatter
from .traced import Track

Op = _native.Op
PROGRAMS: dict[_native.Op, Callable[[Operation], None]] = {
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
MOST_KEPT_NBYTES = 256 * 2**20


@dataclass(eq=False)
class Task:
    """An operation in the queue.

    Attributes:
        operation: The operation.
        work: The caller's handle.
        program: Carries out the operation.
        track: Its record; None: an internal operation, which the group does not count.
        follows: Whether it may begin before the operation ahead has ended; None: not determined
            yet.
    """

    operation: Operation
    work: _native.Work
    program: Callable[[Operation], None]
    track: Track | None
    follows: bool | None = None

    def __post_init__(self) -> None:
        self.agreement = Agreement(self.operation)


class Engine:
    """Runs the collectives in a thread of its own, which starts with the first operation.

    Only this thread calls the network for collectives. It never ends silently: a failure goes to
    every queued work, to this node's ranks through the native group, and to the other nodes by a
    message. A second failure meanwhile, such as MPI's when a rank is gone, changes nothing for the
    callers: they receive the first cause.
    """

    def __init__(self, context: GroupContext) -> None:
        self._context = context
        self._queue: deque[Task] = deque()
        self._running: list[Task] = []
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

    def submit(
        self, request: _native.Request, program: Callable[[Operation], None] | None = None
    ) -> _native.Work:
        """Queue an operation; an internal one, which is not counted, brings its own `program`."""
        work = _native.Work()
        with self._changed:
            if self._stopping:
                raise self._context.closed_error()
            self._start()
            track = self._track(request) if program is None else None
            operation = Operation(self._context, request, self._issued, queue=self)
            request.work = work
            self._queue.append(Task(operation, work, program or PROGRAMS[request.op], track))
            self._changed.notify()
        return work

    def _track(self, request: _native.Request) -> Track:
        self._issued += 1
        return Track(self._context, request, self._issued)

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
                if not self._queue and not message:
                    return
            if message:
                self._send_failure(message)
            elif task := self._head():
                try:
                    self._run(task)
                except BaseException as error:
                    self._fail_running(task, error)

    def _run(self, task: Task) -> None:
        known = self._failure or self._context.native.failure()
        if isinstance(known, SdpError):
            self._queue.popleft()
            self._end(task, known)
            return
        self._begin(task)
        task.agreement.reach()
        task.program(task.operation)
        for done in self._running[:]:
            self._finish(done)
        self._context.trim(MOST_KEPT_NBYTES)

    def _fail_running(self, task: Task, error: BaseException) -> None:
        """Fail the group and the running operations; the thread then fails the queued ones."""
        failure = self.fail(self._cause_of(task, error), error)  # tells the other ranks first
        running, self._running = self._running, []
        for broken in running:
            self._end(broken, failure, error)

    def _cause_of(self, task: Task, error: BaseException) -> Operation:
        """The running operation that failed."""
        operations = [running.operation for running in self._running or [task]]
        seq = error.seq if isinstance(error, SdpError) else None
        return next((found for found in operations if found.seq == seq), operations[0])

    def _end(self, task: Task, failure: SdpError, error: BaseException | None = None) -> None:
        """Fail an operation; even one that has not begun may have headers in flight.

        The traceback of `error` holds the memory of the steps that failed.
        """
        memory = (*self._context.pools.values(), task.operation, error)
        self.abandoned = abandon(task.operation, *memory) or self.abandoned
        self._record(task, failure)
        task.work.fail(native_failure(failure, group=self._context.native.token))

    def _record(self, task: Task, failure: SdpError | None = None) -> None:
        if task.track is not None:
            task.track.end(task.work, failure)

    def _head(self) -> Task | None:
        return self._queue[0] if self._queue else None

    def _begin(self, task: Task) -> None:
        self._queue.popleft()
        if task.track is not None:
            task.track.start()
        self._running.append(task)

    def _finish(self, task: Task) -> None:
        operation = task.operation
        operation.end()
        if task.track is not None:
            self._context.last_completed = operation.signature
        self._running.remove(task)
        self._record(task)
        task.work.finish()

    # ---- for the running operation, in this thread: see ``Queue`` ------------------------------

    def _can_follow(self, task: Task) -> bool:
        if task.follows is None:  # cached: every stage needs it
            task.follows = reductions.can_follow(task.operation)
        return task.follows

    def announce_next(self) -> None:
        """Exchange headers of the next operation with other nodes, if it can follow."""
        task = self._head() if self._context.is_node_leader else None
        if task is not None and self._can_follow(task):
            task.agreement.announce()

    def begin_next(self, operation: Operation) -> Operation | None:
        """Begin the next operation, if all of this node's ranks have called it.

        The leader must also know that the other nodes call the same operation. An operation
        cannot begin if its memory overlaps that of a running one.
        """
        task = self._head()
        ready = False
        if task is not None and self._can_follow(task):
            request = task.operation.request
            ready = not any(request.overlaps(other.operation.request) for other in self._running)
            if ready and self._context.is_node_leader:
                ready = task.agreement.announce()
        if not all_agree(operation, ready) or task is None:
            return None
        self._begin(task)
        task.agreement.reach()
        return task.operation

    def finish(self, operation: Operation) -> None:
        """End an operation while the operations behind it still run."""
        for task in [task for task in self._running if task.operation is operation]:
            self._finish(task)

    # --------------------------------------------------------------------------------------------

    def fail(self, operation: Operation, error: BaseException) -> SdpError:
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

    def _explained(self, operation: Operation, error: BaseException) -> SdpError:
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
