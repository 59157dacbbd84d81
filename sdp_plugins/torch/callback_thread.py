"""The thread that completes futures."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sdp_plugins.core import Work as NativeWork
from sdp_plugins.core._native import CompletionSignal

STOP_S = 10.0
log = logging.getLogger(__name__)


class _Task(NamedTuple):
    is_ready: Callable[[], bool]
    run: Callable[[], None]


class CallbackThread:
    """Completes futures, and runs their callbacks, in a thread that starts with the first task.

    The core sets a signal when an operation is done, and this thread waits only for that signal.
    The core's own threads run no Python: they would wait for the GIL, and a callback may issue
    collectives or block.

    Tasks handle their own errors. A task submitted from within a task, or after `stop`, runs
    immediately in the calling thread, so no task is ever lost.

    Args:
        name: The thread's name.
        in_order: Whether operations end in the order in which they were issued, and callbacks
            run in the order in which they were added. False where peers decide the order, as for
            messages.
    """

    def __init__(self, name: str, in_order: bool = True) -> None:
        self.in_order = in_order
        self._name = name
        self._completions: list[_Task] = []
        self._callbacks: list[_Task] = []
        # Re-entrant: a signal handler may close the group while this thread holds the lock.
        self._lock = threading.RLock()
        self._signal = CompletionSignal()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._calling_back = False

    def when_done(self, works: Sequence[NativeWork], task: Callable[[], None]) -> None:
        """Run `task` once all of `works` are done."""

        def is_done() -> bool:
            return all(work.is_completed() for work in works)

        if self._submit(self._completions, _Task(is_done, task)):
            for work in works:
                work.notify(self._signal)

    def call_back_when(self, is_ready: Callable[[], bool], task: Callable[[], None]) -> None:
        """Run `task`, a user's callback, once `is_ready` and after all callbacks added before."""
        self._submit(self._callbacks, _Task(is_ready, task))

    def call_back(self, callback: Callable[[Any], Any], future: Any) -> Any:
        """Run a user's callback from within a task."""
        before, self._calling_back = self._calling_back, True
        try:
            return callback(future)
        finally:
            self._calling_back = before

    def is_current(self) -> bool:
        """Return whether the current thread is running a task."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def in_callback(self) -> bool:
        """Return whether the caller is a callback that all ranks run in the same order.

        False for callbacks on a future that torch created (`collect_all`): the thread that
        completes its last part runs them, which may be this thread on one rank and the main thread
        on another.
        """
        return self._calling_back and self.is_current()

    def run_until(self, done: Callable[[], bool], callbacks: bool) -> None:
        """From within a task, run later tasks until `done()` is true.

        Args:
            done: The condition that the task waits for.
            callbacks: Whether a callback fulfils the condition. Every rank then runs that callback
                now. An operation may be done already on some ranks only; running callbacks on the
                others would make the order of callbacks differ between ranks.

        Raises:
            RuntimeError: No tasks are left because the group was closed.
        """
        before, self._calling_back = self._calling_back, False
        try:
            while not done():
                if (run := self._take(callbacks)) is None:
                    raise RuntimeError(
                        "the group was closed while a callback waited for another future"
                    )
                run()
        finally:
            self._calling_back = before

    def stop(self) -> None:
        """Finish all submitted tasks and end the thread; leave it behind if a callback blocks."""
        with self._lock:
            self._stopped = True
            thread = self._thread
        self._signal.set()
        if thread is None or thread is threading.current_thread():
            return
        thread.join(STOP_S)
        if thread.is_alive():
            log.warning(
                "a callback of a future still runs %.0f s after its group was closed. Hint: "
                "callbacks must not wait for anything else.",
                STOP_S,
            )

    def _submit(self, tasks: list[_Task], task: _Task) -> bool:
        """Return True after submitting a task to the thread, or False after running it here."""
        if self.is_current() or not self._put(tasks, task):
            task.run()
            return False
        if task.is_ready():  # otherwise the event that makes it ready wakes the thread
            self._signal.set()
        return True

    def _put(self, tasks: list[_Task], task: _Task) -> bool:
        if os.getpid() != self._pid:  # a forked child has neither the thread nor the engine
            return False
        with self._lock:
            if self._stopped:
                return False
            tasks.append(task)
            if self._thread is None:
                # A daemon thread: its group stops it at interpreter exit, in a defined order.
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
        return True

    def _take(self, callbacks: bool) -> Callable[[], None] | None:
        """Wait for the next task and return it; None once the thread stops with none left.

        Only the thread itself takes tasks. With `callbacks` false, skip callback tasks.
        """
        while True:
            stopped = self._stopped  # nothing is added after this
            if (run := self._take_ready(callbacks)) is not None:
                return run
            if stopped and not self._completions and not (callbacks and self._callbacks):
                return None
            self._signal.wait()

    def _take_ready(self, callbacks: bool) -> Callable[[], None] | None:
        completions = 1 if self.in_order else None  # checking all of them takes long if many wait
        for tasks, count in ((self._completions, completions), (self._callbacks, int(callbacks))):
            for task in tasks[:count]:
                if task.is_ready():
                    tasks.remove(task)
                    return task.run
        return None

    def _run(self) -> None:
        with self._lock:  # the starter holds the lock until `is_current` is true here
            pass
        while (run := self._take(callbacks=True)) is not None:
            run()
            del run  # otherwise its tensors would live until the next task
