"""How the ranks of a new group meet: from an exchange of small blobs to shared memory."""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import _native
from .config import Config
from .rendezvous import Exchange, connect

_PIECE_NBYTES = 256 * 1024
_SLOTS = 3
_MOST_STAGING_NBYTES = 24 * 2**20


def staging_nbytes(config: Config, world_size: int) -> int:
    """Size of each rank's staging area.

    A piece of 256 KiB per rank in each of the three slots stays in a core's second-level cache:
    with two ranks twice the pieces are 15 % slower and half as large ones no faster. It is never
    more than one bucket of DDP.
    """
    if config.staging_bytes is not None:
        return config.staging_bytes
    return min(_SLOTS * _PIECE_NBYTES * world_size, _MOST_STAGING_NBYTES)


@dataclass(frozen=True)
class Membership:
    """A rank's place in a group and the native object that serves it."""

    rank: int
    world_size: int
    name: str
    native: _native.NativeGroup


def bring_up(
    rank: int, world_size: int, exchange: Exchange, name: str, timeout_s: float, config: Config
) -> Membership:
    """Meet the other ranks and map each other's segments.

    Args:
        rank: This rank.
        world_size: Number of ranks, all on this node.
        exchange: All-gathers blobs among exactly these ranks.
        name: For messages.
        timeout_s: Deadline for all of it.
        config: Settings; ``staging_bytes`` must be equal on all ranks.

    Raises:
        RendezvousError, PeerLostError, SharedMemoryError: See these classes.
    """
    staging = staging_nbytes(config, world_size)
    segment = os.memfd_create(f"sdp-{name}"[:200], os.MFD_CLOEXEC)
    try:
        _native.initialize_segment(segment, rank, world_size, staging)
        links = connect(rank, world_size, exchange, segment, timeout_s, name=name)
    except BaseException:
        os.close(segment)
        raise
    links.detach()  # the native object closes the descriptors, also if it cannot be made
    native = _native.NativeGroup(
        rank,
        world_size,
        links.segment_fds,
        links.sockets,
        links.pidfds,
        staging,
        -1 if config.spin_us is None else config.spin_us,
    )
    return Membership(rank, world_size, name, native)
