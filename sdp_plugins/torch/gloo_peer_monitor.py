"""Detects immediately when a rank of another node has ended.

When a connection breaks, gloo wakes the threads that wait for its messages, except for messages
that have partly arrived; in a large operation, that is most of the time. A monitor thread therefore
also waits for a message that never arrives in part: the farewell that a rank sends when it leaves
in good order.

Every rank monitors one rank of the next node, and rank 0, whose process may serve the store with
the failure messages of all ranks. A rank that detects an end tells the others. The other ranks'
farewells arrive as well, but a rank reads them only once their connections are closed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from sdp_plugins.core.nodes import Nodes

FAREWELL_LIMIT = timedelta(seconds=1)


def first_line(error: BaseException) -> str:
    """Return gloo's message without the position in its source and without its advice."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return re.sub(r"\[\S+\.cc:\d+\] ", "", line).partition(". ")[0]


def monitored_by(rank: int, nodes: Nodes) -> list[int]:
    """Return the ranks on other nodes that a rank monitors."""
    own = nodes.node_of(rank)
    following = nodes.counterpart(rank, (own + 1) % nodes.count)
    return sorted({peer for peer in (following, 0) if nodes.node_of(peer) != own})


def elsewhere(rank: int, nodes: Nodes) -> list[int]:
    """Return the ranks on other nodes."""
    return sorted(set(range(nodes.world_size)) - set(nodes.members[nodes.node_of(rank)]))


class Farewell:
    """The farewell of a rank that leaves in good order; `work` is gloo's receive of it."""

    def __init__(self, work: Any, peer: int) -> None:
        self.peer = peer
        self.error = ""
        self.broken_s = 0.0
        """When the connection broke, on the monotonic clock; set before `error`."""
        self.ended = threading.Event()
        """Set when the farewell has arrived or the wait has failed."""
        self._work = work
        self._waits = threading.Lock()  # gloo allows one wait

    def monitor(self, limit: timedelta) -> None:
        """Let a thread wait, which detects at once that the connection breaks."""
        threading.Thread(
            target=self._wait, args=[limit], name="sdp-gloo-monitor", daemon=True
        ).start()

    def has_come(self) -> bool:
        """Return whether the farewell has arrived; valid once the connection is closed."""
        self._wait(FAREWELL_LIMIT)
        return self.ended.wait(FAREWELL_LIMIT.total_seconds()) and not self.error

    def _wait(self, limit: timedelta) -> None:
        """Wait for the farewell, unless that has begun before."""
        if not self._waits.acquire(blocking=False):
            return
        try:
            self._work.wait(limit)
        except RuntimeError as error:
            self.broken_s = time.monotonic()
            self.error = first_line(error) or "gloo failed"
        self._work = None
        self.ended.set()


def send_farewells(group: Any, peers: Sequence[int], tag: int) -> None:
    """Send a farewell to the peers that would otherwise report this rank as lost."""
    words = []
    for peer in peers:
        with suppress(RuntimeError):  # ranks that have left or failed need no farewell
            words.append(group.send([torch.zeros(1, dtype=torch.uint8)], peer, tag))
    for word in words:
        with suppress(RuntimeError):
            word.wait(FAREWELL_LIMIT)
