"""Bring up the connections of a group."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..nodes import Nodes
from ..rank_names import DEFAULT, RankNames
from .address import BACKLOG
from .announcement import Announcement
from .deadline import Deadline
from .exchange import Exchange
from .failure import ONE_JOB_HINT, SAME_ORDER_HINT, Occasion, ReasonError
from .links import Links
from .process import close_listener
from .switchboard import Switchboard


@dataclass
class Meeting:
    """The ranks of a group know of each other.

    Attributes:
        occasion: The group that is brought up.
        table: What all ranks have announced.
        listener: Where this rank can be called by those of its node; None for a single rank.
    """

    occasion: Occasion
    table: list[Announcement]
    listener: socket.socket | None

    @property
    def nodes(self) -> Nodes:
        """Who shares memory with whom, if calling them works as their places promise."""
        places = [announcement.place for announcement in self.table]
        return Nodes.of_places(places, [place.host for place in places], self.job_ranks)

    @property
    def job_ranks(self) -> tuple[int, ...] | None:
        """The members' ranks in the job; None if launchers do not tell all of them apart."""
        if self.occasion.names.job_ranks is not None:
            return self.occasion.names.job_ranks
        found = tuple(announcement.job_rank for announcement in self.table)
        return found if min(found) >= 0 and len({*found}) == len(found) else None

    def connect(self, segment_fd: int, members: Sequence[int]) -> Links:
        """Connect this rank with others of its node and swap segments.

        Returns only when each of them has connected with every other.

        Args:
            segment_fd: Descriptor that every peer gets a copy of. It becomes a part of the result;
                on an error it stays the caller's.
            members: Ranks of the node, this one among them.

        Returns:
            The connections, owner of all its descriptors.

        Raises:
            PeerLostError: A rank's process ended meanwhile.
            RendezvousTimeoutError: A rank does not run.
            RendezvousError: A rank is of another user.
        """
        if len(members) == 1 or self.listener is None:
            return Links(0, 1, [segment_fd], [-1], [-1], [self.table[members[0]].pid])
        with self.occasion.telling():
            board = Switchboard(self.listener, self.table, members, segment_fd, self.occasion)
            return board.run()


@contextmanager
def meet(
    rank: int,
    names: RankNames,
    exchange: Exchange,
    timeout_s: float,
    job_rank: int = -1,
) -> Iterator[Meeting]:
    """Learn of all other ranks of a group; a context manager.

    Args:
        rank: This rank.
        names: The group and, as far as is known, its ranks.
        exchange: Called once, with ``ANNOUNCEMENT_NBYTES`` bytes on every rank; not at all for a
            single rank.
        timeout_s: Seconds for everything, the exchange included.
        job_rank: See ``Announcement``.

    Raises:
        RendezvousTimeoutError: A rank did not come.
        RendezvousError: The exchange mixed up several groups.
    """
    occasion, world_size = Occasion(rank, names, Deadline(timeout_s)), names.world_size
    me = Announcement.new(rank, world_size, job_rank)
    if world_size == 1:
        yield Meeting(occasion, [me], None)
        return
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with occasion.telling():
            listener.setblocking(False)
            listener.bind(me.address)
            listener.listen(BACKLOG)
            table = _read(exchange(me.pack(), occasion.deadline.remaining_s), me)
        yield Meeting(occasion, table, listener)
    finally:
        close_listener(listener)


def connect(
    rank: int,
    world_size: int,
    exchange: Exchange,
    segment_fd: int,
    timeout_s: float,
    *,
    name: str = DEFAULT,
) -> Links:
    """``meet``, and connect all: the ranks of a group on one node."""
    with meet(rank, RankNames(name, world_size), exchange, timeout_s) as meeting:
        return meeting.connect(segment_fd, range(world_size))


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
        met = ", ".join(sorted({f"rank {a.rank} of {a.world_size}" for a in table}))
        raise ReasonError.refused(
            f"the exchange mixed up the ranks of several groups ({met})",
            f"{SAME_ORDER_HINT}; {ONE_JOB_HINT}",
        )
    return table
