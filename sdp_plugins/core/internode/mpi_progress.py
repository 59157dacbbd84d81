"""Makes progress on MPI's messages while no thread waits for them.

MPI moves messages only within calls of its functions. A send that is done may still have its last
part in a queue, and its receiver waits for that part. Meanwhile the sender waits for its own node,
or computes. Without a thread in MPI, two nodes can wait for each other forever (MPI-4.1, 3.5 and
3.7.4, allows that, and Open MPI does it over TCP), and links are idle in any case.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TICK_S = 0.001
LONGEST_TICK_S = 0.05
LINGER_S = 10.0
"""How long to call MPI after the last wait, for messages left in queues; ticks become longer."""


class MpiProgress:
    """A thread that calls MPI periodically; starts with the first wait.

    A thread enters this context to wait for something other than MPI.

    Args:
        lock: Held during each call of MPI.
        poke: Calls MPI; called with the lock held.
        lingers: Whether MPI may be called outside of the context too. It may not if the program
            has initialised MPI for calls from one thread at a time, because it may call MPI itself.
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
        """End the thread: MPI is not called again."""
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
                    self._needed.clear()  # the next thread to enter sets it again
                tick_s = TICK_S if self._waits else min(2 * tick_s, LONGEST_TICK_S)
