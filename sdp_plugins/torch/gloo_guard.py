"""Notices at once when a rank of another node is gone.

gloo wakes who waits for a message when its connection breaks; but not who waits for one of which a
part has come, which is most of the time in a large operation. So somebody also waits for a message
of which no part ever comes: the other rank sends it when it leaves in good order.

Every rank does this for one of the next node, and for rank 0, whose process may have the store with
everyone's notices: who notices an end tells the others.
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
    """What gloo says, without the place in its source and without its advice."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return re.sub(r"\[\S+\.cc:\d+\] ", "", line).partition(". ")[0]


def guarded_by(rank: int, nodes: Nodes) -> list[int]:
    """The ranks on other nodes whose end a rank has to notice."""
    own = nodes.node_of(rank)
    following = nodes.keeper(rank, (own + 1) % nodes.count)
    return sorted({peer for peer in (following, 0) if nodes.node_of(peer) != own})


def guards_of(rank: int, nodes: Nodes) -> list[int]:
    """The ranks on other nodes that have to notice a rank's end."""
    return [other for other in range(nodes.world_size) if rank in guarded_by(other, nodes)]


class Guard:
    """A thread that waits for a rank's farewell.

    Args:
        farewell: gloo's receive of it.
        limit: How long gloo may wait.
        peer: The rank.
    """

    def __init__(self, farewell: Any, limit: timedelta, peer: int) -> None:
        self.peer = peer
        self.error = ""
        self.broken_s = 0.0
        """When the connection broke, on the monotonic clock, before `error` is set."""
        self._farewell, self._limit = farewell, limit
        self._thread = threading.Thread(target=self._wait, name="sdp-gloo-guard", daemon=True)
        self._thread.start()

    def join(self, limit_s: float) -> None:
        """Wait until it has ended."""
        self._thread.join(limit_s)

    def _wait(self) -> None:
        try:
            self._farewell.wait(self._limit)
        except RuntimeError as error:
            self.broken_s = time.monotonic()
            self.error = first_line(error) or "gloo failed"


def say_farewell(group: Any, peers: Sequence[int], tag: int) -> None:
    """Tell whoever would take this rank's leave for its end."""
    with suppress(RuntimeError):  # whoever has left or failed needs no farewell
        words = [group.send([torch.zeros(1, dtype=torch.uint8)], peer, tag) for peer in peers]
        for word in words:
            word.wait(FAREWELL_LIMIT)
