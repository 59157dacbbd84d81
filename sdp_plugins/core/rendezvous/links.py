"""The result of connecting a group: descriptors of every peer."""

from __future__ import annotations

from typing import NamedTuple


class Links(NamedTuple):
    """One rank's connections with the others of its node, and their segments.

    All descriptors, the rank's own segment included, are the caller's to close.

    Attributes:
        segment_fds: Every rank's segment; this rank's own at its own index.
        sockets: One ``SOCK_SEQPACKET`` Unix socket per peer, non-blocking and close-on-exec; -1 at
            the own index. Nothing unread is in them but what the peer sent after its ``connect``.
        pidfds: Descriptors that become readable when the peer's process ends; -1 at the own index
            and where the kernel gives none.
    """

    segment_fds: list[int]
    sockets: list[int]
    pidfds: list[int]
