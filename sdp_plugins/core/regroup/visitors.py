"""The ranks that have connected to this one and said who they are."""

from __future__ import annotations

import logging
import selectors
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from ..rendezvous.failure import RendezvousFailure
from .connection import Connection
from .handle import Handle
from .hello import Hello, VersionError
from .listener import Listener
from .roster import Roster

_LOG = logging.getLogger(__name__)


@dataclass
class Visitor:
    """A rank that has connected."""

    connection: Connection
    hello: Hello
    told: int = -1  # the view


class Visitors:
    """Takes the connections to a process; they stay until they end, or are taken away.

    Args:
        listener: Where they come in; closed with this object.
    """

    def __init__(self, listener: Listener) -> None:
        self.handle = listener.handle
        self.known: dict[Handle, Visitor] = {}
        self.refusal: RendezvousFailure | None = None
        """Why the others go on without this rank, as one of them has told it."""
        self._listener = listener
        self._arrivals = count()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener.socket, selectors.EVENT_READ)

    def fileno(self) -> int:
        """A descriptor that is readable when ``look`` has something to do."""
        return self._selector.fileno()

    def look(self) -> None:
        """Accept who has come, read what they say, and forget those that have gone."""
        for key, _ in self._selector.select(0):
            if isinstance(key.fileobj, Connection):
                self._read(key.fileobj)
                continue
            for connection in self._listener.accept():
                self._selector.register(connection, selectors.EVENT_READ, next(self._arrivals))
                self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            while (message := connection.receive()) is not None:
                self._take(connection, message)
        except (EOFError, OSError, ValueError) as error:
            if isinstance(error, ValueError):
                _LOG.warning("dropped a connection to %s: %s", self.handle.where, error)
            self._drop(connection)

    def _take(self, connection: Connection, message: dict[str, Any]) -> None:
        if message.get("secret") == self.handle.secret and "refused" in message:
            self.refusal = RendezvousFailure.unpack(str(message["refused"]).encode())
            return
        try:
            hello = Hello.read(message, self.handle.secret)
        except VersionError as error:
            what = f"one rank uses {error}, another one a different one"
            hint = "install the same version of sdp_plugins for all ranks"
            refuse(connection, RendezvousFailure.refused(what, hint))
            raise
        handle = hello.member.handle
        # A rank connects for each regrouping, and what it said for the last one may be read later.
        known = self.known.get(handle)
        if known is None or self._arrival(known.connection) <= self._arrival(connection):
            self.known[handle] = Visitor(connection, hello)

    def _arrival(self, connection: Connection) -> int:
        return int(self._selector.get_key(connection).data)

    def tell_joining(self, roster: Roster) -> int:
        """Tell those that ask to join who is in the job now: another one leads; return how many."""
        joining = [visitor for visitor in self.known.values() if visitor.hello.roster is None]
        for visitor in joining:
            if visitor.told != roster.view:
                visitor.told = roster.view
                with suppress(OSError):  # the next look finds that it has gone
                    visitor.connection.send({"members": roster.to_json()})
        return len(joining)

    def take(self, handle: Handle) -> Connection:
        """Take away the connection of a visitor."""
        connection = self.known.pop(handle).connection
        self._selector.unregister(connection)
        return connection

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection)
        connection.close()
        for handle, visitor in list(self.known.items()):
            if visitor.connection is connection:
                del self.known[handle]

    def close(self) -> None:
        """Hang up, and refuse whoever else comes."""
        for key in list((self._selector.get_map() or {}).values()):  # none if closed before
            if isinstance(key.fileobj, Connection):
                self._drop(key.fileobj)
        self._selector.close()
        self._listener.close()


def refuse(connection: Connection, failure: RendezvousFailure, secret: str = "") -> None:
    """Tell the other end why it is not needed, if it can be told."""
    try:
        connection.send({"secret": secret, "refused": failure.pack().decode()})
    except OSError as error:
        _LOG.debug("could not refuse a rank: %s", error)
