"""Looks after threads that wait where nothing but a broken connection wakes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

LOOK_EVERY_S = 0.05
LINGER = 20
"""After so many looks at nothing the thread sleeps until it is woken: each wake would cost the one
who waits as much as a small message."""
JOIN_LIMIT_S = 2.0


@dataclass(eq=False)
class Wait:
    """One thread's wait.

    Attributes:
        watch: Raises to give up.
        failure: What it has raised.
        lock: Held while somebody looks, so that a wait which is over is not given up.
        over: Whether it is.
    """

    watch: Callable[[], None]
    failure: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False


class Guard:
    """One thread for all waits of a group; starts with the first.

    Args:
        give_up: Ends all waits; called when a wait's `watch` has raised.
    """

    def __init__(self, give_up: Callable[[], None]) -> None:
        self._give_up = give_up
        self._waits: list[Wait] = []
        self._changed = threading.Condition()
        self._asleep = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def enter(self, watch: Callable[[], None]) -> Wait:
        """A wait begins, of which `leave` has to be told."""
        wait = Wait(watch)
        self._waits.append(wait)
        if self._thread is None or self._asleep:
            with self._changed:
                if self._thread is None and not self._stopping:
                    self._thread = threading.Thread(
                        target=self._loop, name="sdp-gloo-guard", daemon=True
                    )
                    self._thread.start()
                self._changed.notify()
        return wait

    def leave(self, wait: Wait) -> None:
        """It is over.

        Raises:
            BaseException: What its `watch` has raised.
        """
        with wait.lock:
            wait.over = True
        self._waits.remove(wait)
        if wait.failure is not None:
            raise wait.failure from wait.failure.__cause__

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(JOIN_LIMIT_S)

    def _loop(self) -> None:
        looks_at_nothing = 0
        while True:
            with self._changed:
                if not self._stopping:
                    self._changed.wait(LOOK_EVERY_S)
                if looks_at_nothing > LINGER:
                    self._asleep = True  # before the look at what waits: see `enter`
                    self._changed.wait_for(lambda: self._stopping or self._waits)
                    self._asleep = False
                if self._stopping:
                    return
            waits = self._waits.copy()
            looks_at_nothing = 0 if waits else looks_at_nothing + 1
            for wait in waits:
                self._look_at(wait)

    def _look_at(self, wait: Wait) -> None:
        with wait.lock:
            if wait.over or wait.failure is not None:
                return
            try:
                wait.watch()
            except BaseException as error:
                wait.failure = error
                self._give_up()
