"""A thread that runs what has to wait for a device."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

STOP_S = 10.0
log = logging.getLogger(__name__)


class DeviceThread:
    """Runs tasks in order, in a thread that starts with the first.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def put(self, task: Callable[[], None]) -> None:
        """Run a task, which handles its own errors, after all earlier ones."""
        with self._lock:
            if self._thread is None:
                # A daemon thread: its group stops it at interpreter exit, in a defined order.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._tasks.put(task)

    def stop(self) -> None:
        """End the thread after all tasks; their operations have failed with their group."""
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._tasks.put(None)
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            log.warning(
                "a copy from a device still runs %.0f s after its group was closed. Hint: find out "
                "what its stream waits for.",
                STOP_S,
            )

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # otherwise its tensors would live until the next one
