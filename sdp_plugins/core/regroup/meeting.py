"""The ranks that go on, connected with the one that leads."""

from __future__ import annotations

import selectors
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from typing import Any

from ..rank_names import RankNames
from ..rendezvous.context import RendezvousContext
from ..rendezvous.deadline import Deadline
from ..rendezvous.failure import RendezvousFailure
from .connection import Connection
from .roster import Roster

_RETRY_S = 0.005


class Meeting:
    """All-gathers blobs among the ranks of a roster, through one of them; an ``Exchange``.

    It fails on all of them if one leaves before its end.

    Args:
        roster: The ranks.
        rank: This one's.
        connections: By rank: with all others if this one leads, else with the leader.
        leads: Whether this rank leads.
        name: Of the group that is made, for messages.
    """

    def __init__(
        self,
        roster: Roster,
        rank: int,
        connections: Mapping[int, Connection],
        leads: bool,
        name: str,
    ) -> None:
        self.roster, self.rank, self._leads = roster, rank, leads
        self.names = RankNames(
            name, len(roster.members), tuple(member.number for member in roster.members)
        )
        self._connections = dict(connections)
        self._selector = selectors.DefaultSelector()
        for peer, connection in self._connections.items():
            self._selector.register(connection, selectors.EVENT_READ, peer)
        self._received: dict[int, dict[str, Any]] = {}
        self._gone: set[int] = set()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.names.world_size

    def __call__(self, blob: bytes, timeout_s: float) -> list[bytes]:
        """Exchange blobs; see ``Exchange``.

        Cost: two messages for each rank, of which the leader's carries all blobs.

        Raises:
            PeerLostError: A rank has ended, or has left.
            RendezvousTimeoutError: A rank did not answer.
        """
        context = RendezvousContext(self.rank, self.names, Deadline(timeout_s))
        with context.raising_errors():
            if self.world_size == 1:
                return [blob]
            shown = self._lead(blob, context) if self._leads else self._follow(blob, context)
            return [bytes.fromhex(one) for one in shown]

    def check(self) -> None:
        """Raise an error if a rank has left that this one is connected with.

        Raises:
            PeerLostError: One has.
        """
        self._read(self._connections)
        if self._gone:
            context = RendezvousContext(self.rank, self.names, Deadline(0.0))
            raise context.error(self._lost(self._gone))

    def _lead(self, blob: bytes, context: RendezvousContext) -> list[str]:
        try:
            answers = self._next(context)
        except RendezvousFailure as failure:
            self._send({"failed": failure.pack().decode()})
            raise
        answers[self.rank] = {"blob": blob.hex()}
        blobs = [str(answers[rank]["blob"]) for rank in range(self.world_size)]
        self._send({"blobs": blobs})
        self._finish(context)
        return blobs

    def _follow(self, blob: bytes, context: RendezvousContext) -> list[str]:
        self._send({"blob": blob.hex()})
        self._finish(context)
        (answer,) = self._next(context).values()
        if "failed" in answer:
            raise RendezvousFailure.unpack(str(answer["failed"]).encode())
        return list(answer["blobs"])

    def _send(self, message: dict[str, Any]) -> None:
        for connection in self._connections.values():
            with suppress(OSError):  # the next look finds that it has gone
                connection.send(message)

    def _finish(self, context: RendezvousContext) -> None:
        """Send what has not been sent yet."""
        while unsent := {r for r, c in self._connections.items() if c.has_unsent} - self._gone:
            if context.deadline.expired:
                raise self._missing(context, unsent)
            self._look(min(context.deadline.wait_s, _RETRY_S))
            for rank in unsent:
                with suppress(OSError):
                    self._connections[rank].flush()

    def _next(self, context: RendezvousContext) -> dict[int, dict[str, Any]]:
        """Return the next message of every connection, by rank."""
        self._read(self._connections)  # what came with an earlier message
        while missing := self._connections.keys() - self._received.keys():
            if gone := self._gone & missing:
                raise self._lost(gone)
            if context.deadline.expired:
                raise self._missing(context, missing)
            self._look(context.deadline.wait_s)
        received, self._received = self._received, {}
        return received

    def _look(self, wait_s: float) -> None:
        self._read([key.data for key, _ in self._selector.select(wait_s)])

    def _read(self, ranks: Iterable[int]) -> None:
        for rank in set(ranks) - self._gone - self._received.keys():
            try:
                if (message := self._connections[rank].receive()) is not None:
                    self._received[rank] = message
            except (EOFError, OSError, ValueError):
                self._gone.add(rank)
                self._selector.unregister(self._connections[rank])

    def _lost(self, ranks: Set[int]) -> RendezvousFailure:
        what = f"{self.names.list(ranks)} ended, or gave up, while the ranks were meeting"
        return RendezvousFailure.lost(what, ranks)

    def _missing(self, context: RendezvousContext, ranks: Set[int]) -> RendezvousFailure:
        return RendezvousFailure.missing(
            f"{self.names.list(ranks)} did not answer in {context.deadline.allowed}",
            "check whether that rank is stopped or gets no CPU time",
            ranks,
        )

    def close(self) -> None:
        """Hang up; those that still wait fail."""
        self._selector.close()
        for connection in self._connections.values():
            connection.close()
