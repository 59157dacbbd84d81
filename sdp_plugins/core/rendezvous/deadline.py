"""A deadline that can be shared between ranks."""

from __future__ import annotations

import time

_LONGEST_WAIT_S = 24 * 3600.0


class Deadline:
    """Counts down from a time-out, from now on; can only be brought forward."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._start = time.monotonic()
        self._end = self._start + timeout_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    @property
    def wait_s(self) -> float:
        """Time-out for one system call, which is limited; call again after it."""
        return min(self.remaining_s, _LONGEST_WAIT_S)

    @property
    def expired(self) -> bool:
        """Whether the end has come."""
        return time.monotonic() >= self._end

    @property
    def allowed(self) -> str:
        """The time-out for a message, such as ``2.5 s``."""
        return f"{self.timeout_s:.1f}".removesuffix(".0") + " s"

    def limit(self, timeout_s: float, remaining_s: float) -> None:
        """End no later than another rank's deadline, given its time-out and what is left of it."""
        end = time.monotonic() + max(0.0, remaining_s)
        if end < self._end:
            self._end = end
            self.timeout_s = timeout_s

    def extended(self, grace_s: float) -> Deadline:
        """Return a deadline that ends later by some seconds."""
        return Deadline(self._end - time.monotonic() + grace_s)
