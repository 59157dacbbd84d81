"""One attempt of a rank to find those that go on.

Every rank connects to the lowest of those that live and says what it knows. The lowest leads: once
all have come that are not known to have ended, it decides who is in, and tells them. A process has
ended if its host refuses connections to its listener. One that the others have missed, because it
is stopped, say, has a moment to come, and is left out then.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any, NamedTuple

from ..rank_names import DEFAULT, name_ranks
from ..rendezvous.deadline import Deadline
from ..rendezvous.failure import RendezvousFailure
from .connection import Connection
from .handle import Handle
from .hello import Hello, names
from .meeting import Meeting
from .roster import Member, Roster
from .visitors import Visitors, refuse

GRACE_S = 0.5
"""How long a rank that others have missed is waited for."""
_CANDIDATES = 3
"""To how many of the lowest ranks one says hello: the first may be stopped, and another leads."""
_RETRY_S = 0.02
_FLUSH_S = 0.005


class Terms(NamedTuple):
    """What a regrouping is to make.

    Attributes:
        minimum: How many ranks are needed; fewer wait for others to join.
        admits: Whether others may join; the one that leads decides.
        name: Of the group, for messages.
    """

    minimum: int = 1
    admits: bool = True
    name: str = DEFAULT


class Regrouping:
    """See the module.

    Args:
        me: This rank.
        roster: The ranks of the job; of one that joins, those that it has been told, view -1.
        visitors: Who has connected to this rank.
        suspects: Those that this rank has missed.
        deadline: When all are left out that have not come.
        terms: What it is to make.
    """

    def __init__(
        self,
        me: Member,
        roster: Roster,
        visitors: Visitors,
        suspects: Collection[Handle],
        deadline: Deadline,
        terms: Terms,
    ) -> None:
        self.roster = roster
        self._me, self._visitors = me, visitors
        self._suspects = set(suspects)
        self._deadline, self._end = deadline, deadline.extended(4 * GRACE_S)
        self._grace = Deadline(GRACE_S)
        self._terms = terms
        self._calls: dict[Handle, Connection] = {}
        self._retry_at: dict[Handle, float] = {}
        self._dead: set[Handle] = set()
        self._leader: Handle | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(visitors, selectors.EVENT_READ)

    def run(self) -> Meeting:
        """Find the others.

        Raises:
            RendezvousFailure: They go on without this rank, or too few are left.
        """
        try:
            while True:
                while self._call():
                    pass  # some have ended, so others matter
                for key, _ in self._selector.select(self._pause_s()):
                    if key.data is not None:
                        self._read(key.data)
                self._look_at_visitors()
                if self._leader is not None:  # from the first that leads
                    return self._follow(self._leader)
                if (decided := self._decide()) is not None:
                    return self._lead(decided)
                if self._end.expired:
                    raise self._too_few()
        finally:
            self._selector.close()
            for connection in self._calls.values():
                connection.close()

    # ---- whom to wait for ----------------------------------------------------------------------

    @property
    def _joins(self) -> bool:
        return self.roster.view < 0

    @property
    def _absent(self) -> set[Handle]:
        """Those that are not waited for."""
        if self._deadline.expired:
            return set(self.roster.handles)
        return self._suspects if self._grace.expired else set()

    @property
    def _lower(self) -> list[Handle]:
        """Those that come before this rank and may live."""
        handles = self.roster.handles
        if not self._joins:
            handles = handles[: handles.index(self._me.handle)]
        return [handle for handle in handles if handle not in self._dead]

    @property
    def _leads(self) -> bool:
        return not self._joins and self._absent.issuperset(self._lower)

    @property
    def _present(self) -> set[Handle]:
        known = self._visitors.known
        return {self._me.handle, *(handle for handle in self.roster.handles if handle in known)}

    def _pause_s(self) -> float:
        ends = [self._end, self._deadline] if self._deadline.remaining_s else [self._end]
        if self._suspects and self._grace.remaining_s:
            ends.append(self._grace)
        if any(connection.has_unsent for connection in self._calls.values()):
            return _FLUSH_S
        now = time.monotonic()
        waits = [at - now for at in self._retry_at.values() if at > now]
        return min(*waits, *(end.wait_s for end in ends), 1.0)

    # ---- connecting ----------------------------------------------------------------------------

    def _call(self) -> bool:
        """Connect to those that may lead; if this rank leads, to see who lives, to all.

        Returns:
            Whether some were found to have ended.
        """
        n_dead = len(self._dead)
        greeted = self._lower[:_CANDIDATES]
        others = set(self.roster.handles) - self._present - self._dead if self._leads else set()
        for handle in (*greeted, *others.difference(greeted)):
            if handle in self._calls or self._retry_at.get(handle, 0.0) > time.monotonic():
                continue
            self._retry_at.pop(handle, None)
            try:
                self._calls[handle] = connection = Connection.to(handle)
                if handle in greeted:
                    roster = None if self._joins else self.roster
                    hello = Hello(self._me, roster, frozenset(self._suspects))
                    connection.send(hello.to(handle))
            except OSError as error:
                self._hung_up(handle, error)
            else:
                self._selector.register(connection, selectors.EVENT_READ, handle)
        for handle, connection in list(self._calls.items()):
            try:
                connection.flush()
            except OSError as error:
                self._hung_up(handle, error)
        return len(self._dead) > n_dead

    def _read(self, handle: Handle) -> None:
        connection = self._calls.get(handle)
        try:
            while connection and not self._leader and (message := connection.receive()) is not None:
                self._take(handle, message)
        except (EOFError, OSError, ValueError, KeyError) as error:
            self._hung_up(handle, error)

    def _take(self, handle: Handle, message: dict[str, Any]) -> None:
        if "refused" in message:
            raise RendezvousFailure.unpack(str(message["refused"]).encode())
        if "members" in message:  # for one that joins
            told = Roster.from_json(message["members"])
            self.roster = Roster(self.roster.view, told.members)
        else:
            self.roster, self._leader = Roster.from_json(message["roster"]), handle

    def _hung_up(self, handle: Handle, error: Exception) -> None:
        """It has ended if nobody listens there; else it may just not have come yet."""
        connection = self._calls.pop(handle, None)
        if connection is not None:
            if connection in self._selector.get_map():
                self._selector.unregister(connection)
            connection.close()
        if isinstance(error, ConnectionRefusedError):
            self._dead.add(handle)
            if self._joins and not self._lower:
                raise RendezvousFailure.lost("no rank of the job is left to join", [])
        else:
            self._retry_at[handle] = time.monotonic() + _RETRY_S

    def _look_at_visitors(self) -> None:
        self._visitors.look()
        if not self._joins:
            self._visitors.tell_joining(self.roster)
        if self._visitors.refusal is not None:
            raise self._visitors.refusal
        for handle, visitor in list(self._visitors.known.items()):
            theirs = visitor.hello.roster
            if theirs is None:
                continue
            self._suspects |= visitor.hello.suspects.difference([self._me.handle])
            if theirs.view > self.roster.view and self._me.handle in theirs.handles:
                self.roster = theirs  # it has heard of a decision that this rank has not
            if handle not in self.roster.handles and not self._joins:
                connection = self._visitors.take(handle)
                refuse(connection, _left_out(self.roster))
                connection.close()

    # ---- deciding ------------------------------------------------------------------------------

    def _decide(self) -> Roster | None:
        """The next roster, once this rank leads and all have come."""
        if not self._leads:
            return None
        present = self._present
        if not {*self.roster.handles} <= present | self._dead | self._absent:
            return None
        joining = [
            visitor.hello.member
            for handle, visitor in self._visitors.known.items()
            if self._terms.admits
            and visitor.hello.roster is None
            and handle not in self.roster.handles
        ]
        if len(present) + len(joining) < self._terms.minimum:
            return None
        if not self.roster.has_quorum(present, self._dead):
            return None  # the others may still come
        return self.roster.next(present, joining)

    def _lead(self, roster: Roster) -> Meeting:
        for handle in self._absent.difference(roster.handles, self._dead):
            if handle in self._calls:  # it reads that when it runs again
                refuse(self._calls[handle], _left_out(roster), handle.secret)
        connections = {}
        for rank, handle in enumerate(roster.handles):
            if handle == self._me.handle:
                continue
            connections[rank] = self._visitors.take(handle)
            with suppress(OSError):  # the meeting finds that it has gone
                connections[rank].send({"roster": roster.to_json()})
        rank = roster.handles.index(self._me.handle)
        return Meeting(roster, rank, connections, True, self._terms.name)

    def _follow(self, leader: Handle) -> Meeting:
        rank, leads = map(self.roster.handles.index, (self._me.handle, leader))
        connection = self._calls.pop(leader)
        self._selector.unregister(connection)
        return Meeting(self.roster, rank, {leads: connection}, False, self._terms.name)

    def _too_few(self) -> RendezvousFailure:
        present = self._present
        missing = [m for m in self.roster.members if m.handle not in present | self._dead]
        if self._joins:
            what = f"no rank of the job has let this rank in for {self._deadline.allowed}"
            hint = "ranks join between two steps; check whether the job's steps take so long"
        elif len(present) < self._terms.minimum:
            what = f"{len(present)} ranks are left, and none has joined them for "
            what += f"{self._deadline.allowed}; the job needs {self._terms.minimum}"
            hint = "start more ranks, or allow fewer"
        else:
            what = f"{names(missing)} did not come in {self._deadline.allowed}, and may go on "
            what += "without this rank"
            hint = "check the network between the nodes"
        return RendezvousFailure.missing(what, hint, (member.number for member in missing))


def _left_out(roster: Roster) -> RendezvousFailure:
    staying = name_ranks(member.number for member in roster.members)
    return RendezvousFailure.refused(
        f"{staying} went on without this one, which did not come in time",
        "this rank was stopped, or took longer than the time-out; start it again to let it join",
    )
