"""How long an operation waits before it gives up."""

from __future__ import annotations

import time

MOST_GRACE_S = 1.0


class Patience:
    """The deadlines of one operation: its time-out, and graces after that.

    Ranks may wait for each other in a chain; the rank that waits for the culprit itself should give
    up first, because its error names the culprit. So a rank that waits for another one of its node
    gives up one grace after the time-out, but not while that one says that it waits for another
    node. A rank that waits to hear what another node calls gives up after two graces, and one that
    waits for data after one more for each hop.

    Args:
        timeout_s: The operation's time-out.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._grace_s = min(MOST_GRACE_S, 0.2 * timeout_s)
        self._started_s = time.monotonic()
        self.hops = 1
        """Messages between nodes that wait for each other, one after the other."""

    def restart(self) -> None:
        """Start the time-out now."""
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    @property
    def expired(self) -> bool:
        """Whether the time-out is over."""
        return self.elapsed_s >= self._timeout_s

    def hop_expired(self, hop: int) -> bool:
        """Whether it is time to give up waiting for the data of a hop; 0: for headers."""
        return self._left_s(2 + hop) <= 0.0

    @property
    def on_this_node_s(self) -> float:
        """Seconds left for ranks of this node; above 0."""
        return max(self._left_s(1), 0.001)

    @property
    def extra_s(self) -> float:
        """Seconds that ranks of this node get on top while they wait for other nodes."""
        return (2 + self.hops) * self._grace_s

    def _left_s(self, graces: int) -> float:
        return self._timeout_s + graces * self._grace_s - self.elapsed_s
