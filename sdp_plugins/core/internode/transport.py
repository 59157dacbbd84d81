"""The interface of a transport between nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from ..nodes import Nodes
from ..rendezvous.store_exchange import Exchange


class Stream(IntEnum):
    """Purpose of messages; those of one stream arrive in order.

    A message counts as done only after those before it in its stream. Messages of a reduction's
    segments that overtake those of others therefore have streams of their own.
    """

    data = 0
    """Headers and data of collectives, except for the streams below."""
    inner_levels = 1
    """Partial sums of a reduction's later levels."""
    results = 2
    """A reduction's results."""
    point_to_point = 3
    """Sends and receives."""


@dataclass(eq=False)
class Pending:
    """A message in flight.

    Attributes:
        peer: The rank at its other end.
    """

    peer: int


M = TypeVar("M", bound=Pending)


class Channel(Protocol[M]):
    """Messages between this rank and the ranks of a group on other nodes.

    Messages from one rank to another arrive in the order in which they were sent, and match
    receives in the order in which these were posted. Both sides give the same length. One thread at
    a time uses a channel, except for ``close`` and ``received_failure``.
    """

    def send(self, peer: int, address: int, nbytes: int) -> M:
        """Start sending memory, which must not change until the message is done."""

    def receive(self, peer: int, address: int, nbytes: int) -> M:
        """Start receiving into memory, which must stay valid until the message is done."""

    def wait(self, pending: Sequence[M], watch: Callable[[], None]) -> None:
        """Block until all messages are done.

        Args:
            pending: The messages.
            watch: Called at least every 50 ms; raises to give up.

        Raises:
            WireError: A connection broke.
        """

    def unattended(self) -> AbstractContextManager[None]:
        """Return a context in which messages make progress without calls from this thread."""

    def late(self, pending: Sequence[M]) -> set[int]:
        """The peers whose messages are not done; called at a deadline."""

    def gone(self, peers: Collection[int]) -> set[int]:
        """The ranks among `peers` that are known to be unreachable.

        Called when another rank is unreachable; the channel is given up after that.
        """

    def branch(self, stream: Stream) -> Channel[M]:
        """Another channel to the same ranks, with an order of its own for its messages.

        Peers do not distinguish the branches of one stream.
        """

    def abandon(self, pending: Sequence[M]) -> bool:
        """Give up messages after a failure; cancels receives as far as possible.

        Returns:
            Whether some are still in flight.
        """

    def withdraw(self, pending: Sequence[M]) -> bool:
        """Take back receives of messages that were never sent, when the group closes normally.

        Returns:
            Whether some are still in flight.
        """

    def left(self, peer: int) -> bool:
        """Whether an unreachable rank is known to have closed the group normally."""

    def send_failure(self, message: bytes) -> None:
        """Tell the ranks on other nodes why this one gives up; the first message counts."""

    def received_failure(self) -> bytes | None:
        """The first message of another rank; None: none has arrived."""

    def close(self, *, abandon: bool) -> None:
        """Close; with `abandon` messages may still be in flight, and their memory is kept."""


class WireError(Exception):
    """Raised when a transport reports an error; the text is the transport's."""

    def __init__(self, text: str, peers: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.peers = tuple(peers)


class Network(Protocol):
    """Opens channels."""

    @property
    def name(self) -> str:
        """Name of the network, for messages and reports."""

    def open(
        self, rank: int, nodes: Nodes, exchange: Exchange, name: str, timeout_s: float
    ) -> Channel[Any]:
        """Open a group's channel; called on all of its ranks.

        Raises:
            RendezvousError: The channel cannot be opened.
        """
