"""Bring up the connections of a group."""

from __future__ import annotations

import socket

from .address import BACKLOG
from .announcement import Announcement
from .deadline import Deadline
from .exchange import Exchange
from .failure import ONE_JOB_HINT, Occasion, ReasonError
from .links import Links
from .process import close_listener
from .switchboard import Switchboard


def connect(
    rank: int,
    world_size: int,
    exchange: Exchange,
    segment_fd: int,
    timeout_s: float,
    *,
    name: str = "default",
) -> Links:
    """Connect this rank with all others of a group and swap segments.

    Returns only when every rank has connected with every other.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        exchange: Called once, with ``ANNOUNCEMENT_NBYTES`` bytes on every rank; not at all for a
            single rank.
        segment_fd: Descriptor that every peer gets a copy of. It becomes a part of the result; on
            an error it stays the caller's.
        timeout_s: Seconds for everything, the exchange included.
        name: Name of the group, for messages.

    Returns:
        The connections, owner of all its descriptors.

    Raises:
        PeerLostError: A rank's process ended meanwhile.
        RendezvousTimeoutError: A rank did not come, or does not run.
        RendezvousError: A rank is on another node or of another user, or the exchange mixed up
            several groups.
    """
    occasion = Occasion(rank, world_size, name, Deadline(timeout_s))
    me = Announcement.new(rank, world_size)
    if world_size == 1:
        return Links(rank, 1, [segment_fd], [-1], [-1], [me.pid], [me.place.host])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.setblocking(False)
        listener.bind(me.address)
        listener.listen(BACKLOG)
        blobs = exchange(me.pack(), occasion.deadline.remaining_s)
        return Switchboard(listener, _read(blobs, me), segment_fd, occasion).run()
    except ReasonError as failed:
        raise occasion.error(failed.reason) from failed.__cause__
    except OSError as error:
        raise occasion.error(ReasonError.system(error).reason) from error
    finally:
        close_listener(listener)


def _read(blobs: list[bytes], me: Announcement) -> list[Announcement]:
    """Check that the exchange gave one table to one group."""
    try:
        table = [Announcement.unpack(bytes(blob)) for blob in blobs]
    except ValueError as error:
        raise ReasonError.refused(
            f"the exchange returned {error}", "use the same version of sdp_plugins for all ranks"
        ) from error
    expected = [(rank, me.world_size) for rank in range(me.world_size)]
    if [(a.rank, a.world_size) for a in table] != expected or table[me.rank] != me:
        raise ReasonError.refused("the exchange mixed up the ranks of several groups", ONE_JOB_HINT)
    return table
