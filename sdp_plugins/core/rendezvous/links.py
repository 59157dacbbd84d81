"""The result of bringing up a group: descriptors to every peer."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass
class Links:
    """One rank's connections with the others of its node, and their segments.

    It owns all descriptors, the rank's own segment included, until ``detach``.

    Attributes:
        rank: This rank's index on its node.
        world_size: Number of ranks there.
        segment_fds: Every rank's segment; this rank's own at its own index.
        sockets: One ``SOCK_SEQPACKET`` Unix socket per peer, non-blocking and close-on-exec; -1 at
            the own index. Nothing unread is in them but what the peer sent after its ``connect``.
        pidfds: Descriptors that become readable when the peer's process ends; -1 at the own index
            and where the kernel gives none.
        pids: Process ids, in this process's pid namespace where visible there.
    """

    rank: int
    world_size: int
    segment_fds: list[int]
    sockets: list[int]
    pidfds: list[int]
    pids: list[int]
    _owned: bool = field(default=True, repr=False)

    def detach(self) -> None:
        """Give the descriptors away: they belong to the caller now and ``close`` does nothing."""
        self._owned = False

    def close(self) -> None:
        """Close all descriptors; does nothing the second time."""
        if not self._owned:
            return
        self._owned = False
        for fd in (*self.segment_fds, *self.sockets, *self.pidfds):
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)

    def __enter__(self) -> Links:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
