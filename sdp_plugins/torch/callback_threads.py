"""Threads that complete futures."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

Task = Callable[[], None]


STOP_S = 10.0
log = logging.getLogger(__name__)


def join(thread: threading.Thread, end: float | None = None) -> None:
    """Wait for a thread whose group is closed: only a callback of the user can keep it.

    Args:
        thread: To be waited for.
        end: Until when, by `time.monotonic`; None: for as long as any thread.
    """
    thread.join(STOP_S if end is None else max(0.0, end - time.monotonic()))
    if thread.is_alive():
        log.warning(
            "a callback of a future still runs %.0f s after its group was closed. Hint: callbacks "
            "must not wait for anything else.",
            STOP_S,
        )


class CallbackThread:
    """Runs tasks in the order of their submission, in a thread that starts with the first one.

    Tasks handle their own errors. A task submitted from within a task, or after `stop`, runs at
    once in the calling thread, so no task is ever lost.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: deque[tuple[Task, bool]] = deque()  # and whether it is a user's callback
        # Re-entrant: a signal handler may leave the group in the midst of it.
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._calling_back = False

    def submit(self, task: Task, is_callback: bool = False) -> None:
        """Run `task` after all tasks submitted before it.

        Args:
            task: What to run.
            is_callback: Whether it calls a user's callback. These keep their order, whoever waits
                for what; completions of operations may overtake them.
        """
        if self.is_current() or not self._put(task, is_callback):
            task()

    def call_back(self, callback: Callable[[Any], Any], future: Any) -> Any:
        """Within a task: run a user's callback."""
        before, self._calling_back = self._calling_back, True
        try:
            return callback(future)
        finally:
            self._calling_back = before

    def is_current(self) -> bool:
        """Whether the caller is a task."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def in_callback(self) -> bool:
        """Whether the caller is a callback, in the order of which all ranks agree.

        Not one that was added to a future of torch's own making (`collect_all`): that is run by
        whoever completes the last part, here on one rank and on the main thread of another.
        """
        return self._calling_back and self.is_current()

    def run_until(self, done: Callable[[], bool], callbacks: bool) -> None:
        """Within a task that waits for what later tasks do: run these now.

        Args:
            done: What it waits for.
            callbacks: Whether that is done by a callback, which every rank has to run now. What an
                operation does may be there already on some ranks: no callback may run on the others
                that does not run there, or the ranks' callbacks would be in different orders.

        Raises:
            RuntimeError: There are no more, as the group was closed.
        """
        before, self._calling_back = self._calling_back, False
        try:
            while not done():
                if (task := self._take(callbacks)) is None:
                    raise RuntimeError(
                        "the group was closed while a callback waited for another future"
                    )
                task()
        finally:
            self._calling_back = before

    def stop(self) -> None:
        """Finish what was submitted and end the thread; it is left behind if a callback blocks."""
        with self._changed:
            self._stopped = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            join(thread)

    def _put(self, task: Task, is_callback: bool) -> bool:
        with self._changed:
            if self._stopped:
                return False
            self._tasks.append((task, is_callback))
            if self._thread is None:
                # A daemon: its group stops it at the interpreter's exit, in an order of ours.
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread  # before it can take anything
            self._changed.notify_all()
        return True

    def _take(self, callbacks: bool) -> Task | None:
        """The next task (not a callback), once there is one; None if there will be no more."""
        with self._changed:
            while True:
                for at, (task, is_callback) in enumerate(self._tasks):
                    if callbacks or not is_callback:
                        del self._tasks[at]
                        return task
                if self._stopped:
                    return None
                self._changed.wait()

    def _run(self) -> None:
        while (task := self._take(callbacks=True)) is not None:
            task()
            del task  # or its tensors would live until the next one comes


class ThreadPerTask:
    """Runs each task in a thread of its own.

    For receives: which of them is done first is up to the peers, and to wait for them in any order
    could wait forever.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: set[threading.Thread] = set()

    def submit(self, task: Task) -> None:
        """Start `task`."""

        def run() -> None:
            task()
            self._threads.discard(thread)

        thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException:
            self._threads.discard(thread)
            raise

    def stop(self) -> None:
        """Wait for all tasks."""
        end = time.monotonic() + STOP_S
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                join(thread, end)
