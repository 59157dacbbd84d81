"""The deadlines of an operation."""

from __future__ import annotations

import time

MOST_GRACE_S = 1.0


class Deadlines:
    """The deadlines of one operation: its time-out, plus grace periods.

    Ranks may wait for each other in a chain. The rank that waits for the culprit itself should give
    up first, because its error names the culprit. A rank that waits for another rank of its node
    therefore gives up one grace period after the time-out, unless the other rank signals that it
    waits for another node. A rank that waits for headers gives up after two grace periods (after
    three in the second round, with more than 16 nodes), and one that waits for data after one more
    for each hop.

    Args:
        timeout_s: The operation's time-out.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._grace_s = min(MOST_GRACE_S, 0.2 * timeout_s)
        self._started_s = time.monotonic()
        self.hops = 1
        """Number of messages between nodes that wait for one another in sequence."""

    def restart(self) -> None:
        """Restart the time-out now."""
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
        """Whether the deadline for the data of a hop has passed; 0: for headers."""
        return self._left_s(2 + hop) <= 0.0

    @property
    def on_this_node_s(self) -> float:
        """Seconds left to wait for ranks of this node; above 0."""
        return max(self._left_s(1), 0.001)

    @property
    def extra_s(self) -> float:
        """Seconds added for ranks of this node while they wait for other nodes."""
        return (2 + self.hops) * self._grace_s

    def _left_s(self, graces: int) -> float:
        return self._timeout_s + graces * self._grace_s - self.elapsed_s
