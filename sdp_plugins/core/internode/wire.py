"""What a transport between nodes offers to a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..nodes import Nodes
from ..rendezvous.exchange import Exchange


class Pending(Protocol):
    """A message on its way."""

    @property
    def peer(self) -> int:
        """The rank at its other end."""


class Channel(Protocol):
    """Messages between this rank and the ranks of a group on other nodes.

    The messages from one rank to another arrive in the order in which they were sent, and are
    taken in the order in which receptions were posted; both sides give the same length. One thread
    at a time uses a channel, but for ``close`` and ``told``.
    """

    def send(self, peer: int, address: int, nbytes: int) -> Pending:
        """Start sending memory, which must stay as it is until the message is done."""

    def receive(self, peer: int, address: int, nbytes: int) -> Pending:
        """Start receiving into memory, which must stay there until the message is done."""

    def wait(self, pending: Sequence[Pending], watch: Callable[[], None]) -> None:
        """Block until all messages are done.

        Args:
            pending: What to wait for.
            watch: Called at least every 50 ms; raises to give up.

        Raises:
            WireError: A connection broke.
        """

    def done(self, pending: Pending) -> bool:
        """Whether a message is done, without waiting."""

    def tell(self, notice: bytes) -> None:
        """Tell the ranks on other nodes why this one gives up; the first notice counts."""

    def told(self) -> bytes | None:
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

    name: str
    """For messages and reports."""

    def open(
        self, rank: int, nodes: Nodes, exchange: Exchange, name: str, timeout_s: float
    ) -> Channel:
        """Open a group's channel; called on all of its ranks.

        Raises:
            RendezvousError: It is not possible.
        """
