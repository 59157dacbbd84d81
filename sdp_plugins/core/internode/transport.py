"""What a transport between nodes offers to a group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from ..nodes import Nodes
from ..rendezvous.exchange import Exchange


class Stream(IntEnum):
    """What messages are for; those of one stream arrive in order.

    A message is only seen to be done when those before it in its stream are. So what may be sent
    ahead of the rest of an operation has a stream of its own.
    """

    data = 0
    """Collectives' data, unless another stream is named for it."""
    inner_levels = 1
    """Partial sums of a reduction's later levels."""
    results = 2
    """A reduction's results."""
    headers = 3
    """What is called next."""
    point_to_point = 4
    """Sends and receives."""


@dataclass(eq=False)
class Pending:
    """A message on its way.

    Attributes:
        peer: The rank at its other end.
    """

    peer: int


M = TypeVar("M", bound=Pending)


class Channel(Protocol[M]):
    """Messages between this rank and the ranks of a group on other nodes.

    The messages from one rank to another arrive in the order in which they were sent, and are
    taken in the order in which receptions were posted; both sides give the same length. One thread
    at a time uses a channel, but for ``close`` and ``told``.
    """

    def send(self, peer: int, address: int, nbytes: int) -> M:
        """Start sending memory, which must stay as it is until the message is done."""

    def receive(self, peer: int, address: int, nbytes: int) -> M:
        """Start receiving into memory, which must stay there until the message is done."""

    def wait(self, pending: Sequence[M], watch: Callable[[], None]) -> None:
        """Block until all messages are done.

        Args:
            pending: What to wait for.
            watch: Called at least every 50 ms; raises to give up.

        Raises:
            WireError: A connection broke.
        """

    def done(self, pending: Sequence[M]) -> bool:
        """Whether all messages are done, as far as is known.

        Raises:
            WireError: See ``wait``.
        """

    def unattended(self) -> AbstractContextManager[None]:
        """While in this, the thread waits for something else; messages go on all the same."""

    def late(self, pending: Sequence[M]) -> set[int]:
        """The peers whose messages are not done; asked when nothing more is expected of them."""

    def gone(self, peers: Collection[int]) -> set[int]:
        """Those of some ranks that cannot be reached, as far as is known.

        Asked when another one cannot be; the channel is given up after that.
        """

    def branch(self, stream: Stream) -> Channel[M]:
        """Another channel to the same ranks, whose messages are in order by themselves.

        All branches of one stream are the same to the ranks at their other ends.
        """

    def abandon(self, pending: Sequence[M]) -> bool:
        """Give up messages after a failure: as far as possible, none is received any more.

        Returns:
            Whether some are still on their way.
        """

    def withdraw(self, pending: Sequence[M]) -> bool:
        """Take back receives of messages that nobody has sent, as the group is left in good order.

        Returns:
            Whether some are still on their way.
        """

    def left(self, peer: int) -> bool:
        """Whether a rank that cannot be reached has left in good order, as far as is known."""

    def send_failure(self, message: bytes) -> None:
        """Tell the ranks on other nodes why this one gives up; the first message counts."""

    def received_failure(self) -> bytes | None:
        """What another rank has told, if one has."""

    def close(self, *, abandon: bool) -> None:
        """Leave; with ``abandon`` messages may still be on their way, and their memory is kept."""


class WireError(Exception):
    """Raised when a transport reports an error; the text is the transport's."""

    def __init__(self, text: str, peers: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.peers = tuple(peers)


class Network(Protocol):
    """Opens channels."""

    @property
    def name(self) -> str:
        """For messages and reports."""

    def open(
        self, rank: int, nodes: Nodes, exchange: Exchange, name: str, timeout_s: float
    ) -> Channel[Any]:
        """Open a group's channel; called on all of its ranks.

        Raises:
            RendezvousError: It is not possible.
        """
