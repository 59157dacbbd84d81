"""Notices at once when a rank of another node is gone.

gloo wakes who waits for a message when its connection breaks; but not who waits for one of which a
part has come, which is most of the time in a large operation. So somebody also waits for a message
of which no part ever comes: the other rank sends it when it leaves in good order.

Every rank does this for one of the next node, and for rank 0, whose process may have the store with
everyone's notices: who notices an end tells the others. The other ranks' farewells come as well,
but nobody waits for them until their connections are gone.
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
    following = nodes.counterpart(rank, (own + 1) % nodes.count)
    return sorted({peer for peer in (following, 0) if nodes.node_of(peer) != own})


def elsewhere(rank: int, nodes: Nodes) -> list[int]:
    """The ranks on other nodes."""
    return sorted(set(range(nodes.world_size)) - set(nodes.members[nodes.node_of(rank)]))


class Goodbye:
    """A rank's word that it leaves in good order.

    Args:
        work: gloo's receive of it.
        peer: The rank.
    """

    def __init__(self, work: Any, peer: int) -> None:
        self.peer = peer
        self.error = ""
        self.broken_s = 0.0
        """When the connection broke, on the monotonic clock, before `error` is set."""
        self._work = work
        self._lock = threading.Lock()

    def wait(self, limit: timedelta) -> None:
        """Until it has come, or the connection is gone."""
        with self._lock:
            work, self._work = self._work, None  # it can be waited for once
            if work is None:
                return
            try:
                work.wait(limit)
            except RuntimeError as error:
                self.broken_s = time.monotonic()
                self.error = first_line(error) or "gloo failed"

    def has_come(self) -> bool:
        """Whether it has; asked when the connection is gone."""
        self.wait(FAREWELL_LIMIT)
        return not self.error


class PeerMonitor(Goodbye):
    """A thread that waits for a rank's farewell.

    Args:
        work: See ``Goodbye``.
        limit: How long gloo may wait.
        peer: See ``Goodbye``.
    """

    def __init__(self, work: Any, limit: timedelta, peer: int) -> None:
        super().__init__(work, peer)
        self._thread = threading.Thread(
            target=self.wait, args=[limit], name="sdp-gloo-guard", daemon=True
        )
        self._thread.start()

    def has_come(self) -> bool:
        """See ``Goodbye``."""
        self.join(FAREWELL_LIMIT.total_seconds())
        return not self._thread.is_alive() and not self.error

    def join(self, limit_s: float) -> None:
        """Wait until it has ended."""
        self._thread.join(limit_s)


def say_farewell(group: Any, peers: Sequence[int], tag: int) -> None:
    """Tell whoever would take this rank's leave for its end."""
    words = []
    for peer in peers:
        with suppress(RuntimeError):  # whoever has left or failed needs no farewell
            words.append(group.send([torch.zeros(1, dtype=torch.uint8)], peer, tag))
    for word in words:
        with suppress(RuntimeError):
            word.wait(FAREWELL_LIMIT)
