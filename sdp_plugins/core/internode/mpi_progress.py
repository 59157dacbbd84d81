"""Keeps MPI's messages going while nobody waits for them.

MPI moves messages within its calls, and only there. A send that is done may still have a last word
in a queue, without which its receiver goes on waiting. Meanwhile its sender waits for its own node,
or computes: without anyone in MPI, two nodes can wait for each other for ever (MPI-4.1, 3.5 and
3.7.4, allows that, and Open MPI does it over TCP), and links are idle in any case.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TICK_S = 0.001
LONGEST_TICK_S = 0.05
LINGER_S = 10.0
"""After the last wait, for what is left in queues then: ticks become longer and longer."""


class Progress:
    """A thread that calls MPI now and then; starts with the first wait.

    A context: within it, the thread that enters waits for something else than MPI.

    Args:
        lock: Held by whoever calls MPI.
        poke: Calls MPI, with the lock.
        lingers: Whether MPI may be called outside of contexts, too. It may not where a program that
            has only promised to call MPI from one thread at a time may do so itself.
    """

    def __init__(
        self, lock: threading.RLock, poke: Callable[[], None], *, lingers: bool = True
    ) -> None:
        self._lock = lock
        self._poke = poke
        self._linger_s = LINGER_S if lingers else 0.0
        self._waits = 0
        self._ended = False
        self._left_s = 0.0
        self._needed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._waits += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="sdp-mpi", daemon=True)
                self._thread.start()
        if not self._needed.is_set():
            self._needed.set()

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._waits -= 1
            self._left_s = time.monotonic()

    def end(self, limit_s: float) -> None:
        """Never call MPI again."""
        with self._lock:
            self._ended = True
        self._needed.set()
        if self._thread is not None:
            self._thread.join(limit_s)

    def _loop(self) -> None:
        tick_s = TICK_S
        while True:
            self._needed.wait()
            time.sleep(tick_s)
            with self._lock:
                if self._ended:
                    return
                if self._waits or time.monotonic() - self._left_s < self._linger_s:
                    self._poke()
                else:
                    self._needed.clear()  # whoever enters next sets it after this
                tick_s = TICK_S if self._waits else min(2 * tick_s, LONGEST_TICK_S)
