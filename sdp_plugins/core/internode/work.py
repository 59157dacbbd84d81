"""A handle on an operation of a group that spans nodes; the counterpart of the native one."""

from __future__ import annotations

import threading


class Work:
    """Done once, with or without a failure."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._failure: BaseException | None = None
        self._source = -1

    def finish(self, failure: BaseException | None, source: int = -1) -> None:
        """Called once, by whoever ran the operation."""
        self._failure, self._source = failure, source
        self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """True when done, False after the time-out; raises the operation's failure."""
        if not self._done.wait(min(timeout_s, threading.TIMEOUT_MAX)):
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def completed(self) -> bool:
        """Whether it is done."""
        return self._done.is_set()

    def failure(self) -> BaseException | None:
        """Its failure, if it has completed with one."""
        return self._failure

    def source_rank(self) -> int:
        """For a receive: who sent; else -1."""
        return self._source
