"""Bring up the connections of a group."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..nodes import Nodes
from ..rank_names import RankNames
from .announcement import RankAnnouncement
from .bootstrap_address import BACKLOG
from .context import RendezvousContext
from .deadline import Deadline
from .failure import ONE_JOB_HINT, SAME_ORDER_HINT, RendezvousFailure
from .mesh_connector import Links, MeshConnector
from .peer_process import close_listener
from .store_exchange import Exchange


@dataclass
class Rendezvous:
    """What a rank knows of the other ranks of its group.

    Attributes:
        context: The group that is brought up.
        table: What all ranks have announced.
        listener: Where ranks of this node connect to this one; None for a single rank.
    """

    context: RendezvousContext
    table: list[RankAnnouncement]
    listener: socket.socket | None

    @property
    def nodes(self) -> Nodes:
        """The ranks by node, according to their announcements."""
        places = [announcement.place for announcement in self.table]
        return Nodes.of_places(places, [place.host for place in places], self.global_ranks)

    @property
    def global_ranks(self) -> tuple[int, ...] | None:
        """The members' ranks in the job; None if launchers do not tell all of them apart."""
        if self.context.names.global_ranks is not None:
            return self.context.names.global_ranks
        found = tuple(announcement.global_rank for announcement in self.table)
        return found if min(found) >= 0 and len({*found}) == len(found) else None

    def connect(self, segment_fd: int, members: Sequence[int]) -> Links:
        """Connect this rank to others of its node, and exchange segments.

        Returns only when each of them is connected to every other.

        Args:
            segment_fd: Descriptor of which every peer gets a copy. The result owns it; after an
                error the caller still does.
            members: Ranks of the node, including this one.

        Returns:
            The connections, which own all descriptors.

        Raises:
            PeerLostError: A rank's process ended meanwhile.
            RendezvousTimeoutError: A rank does not run.
            RendezvousError: A rank is of another user.
        """
        if len(members) == 1 or self.listener is None:
            return Links([segment_fd], [-1], [-1])
        with self.context.raising_errors():
            board = MeshConnector(self.listener, self.table, members, segment_fd, self.context)
            return board.run()


@contextmanager
def meet(
    rank: int,
    names: RankNames,
    exchange: Exchange,
    timeout_s: float,
    global_rank: int = -1,
) -> Iterator[Rendezvous]:
    """Exchange announcements with all ranks of a group; a context manager.

    Args:
        rank: This rank.
        names: The group and, as far as known, its ranks.
        exchange: Called once, with ``ANNOUNCEMENT_NBYTES`` bytes on every rank; not at all for a
            single rank.
        timeout_s: Seconds for everything, the exchange included.
        global_rank: See ``RankAnnouncement``.

    Raises:
        RendezvousTimeoutError: A rank did not arrive.
        RendezvousError: The exchange mixed up several groups.
    """
    context, world_size = RendezvousContext(rank, names, Deadline(timeout_s)), names.world_size
    me = RankAnnouncement.new(rank, world_size, global_rank)
    if world_size == 1:
        yield Rendezvous(context, [me], None)
        return
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with context.raising_errors():
            listener.setblocking(False)
            listener.bind(me.address)
            listener.listen(BACKLOG)
            table = _read(exchange(me.pack(), context.deadline.remaining_s), me)
        yield Rendezvous(context, table, listener)
    finally:
        close_listener(listener)


def _read(blobs: list[bytes], me: RankAnnouncement) -> list[RankAnnouncement]:
    """Check that the exchange gave one table to one group."""
    try:
        table = [RankAnnouncement.unpack(bytes(blob)) for blob in blobs]
    except ValueError as error:
        raise RendezvousFailure.refused(
            f"the exchange returned {error}", "use the same version of sdp_plugins for all ranks"
        ) from error
    expected = [(rank, me.world_size) for rank in range(me.world_size)]
    if [(a.rank, a.world_size) for a in table] != expected or table[me.rank] != me:
        met = ", ".join(sorted({f"rank {a.rank} of {a.world_size}" for a in table}))
        raise RendezvousFailure.refused(
            f"the exchange mixed up the ranks of several groups ({met})",
            f"{SAME_ORDER_HINT}; {ONE_JOB_HINT}",
        )
    return table
