"""This process's place in a job whose ranks may be lost, and join."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from typing import TypeVar

from ..errors import PeerLostError, RendezvousTimeoutError
from ..rank_names import RankNames
from ..rendezvous import Exchange
from ..rendezvous.context import RendezvousContext
from ..rendezvous.deadline import Deadline
from .handle import Handle
from .listener import Listener
from .meeting import Meeting
from .regrouping import Regrouping, Terms
from .roster import Member, Roster
from .roster_file import latest, note
from .visitors import Visitors

T = TypeVar("T")


class Participant:
    """A process that can be a rank of one group after another.

    Attributes:
        me: Its number, and its address for the others.
        roster: The ranks of the job, as far as this process knows.

    Args:
        number: Its number in the job.
        host: The address of this host at which others reach it.
        roster_file: The launcher's file of the job's rosters; None: there is none.
    """

    def __init__(self, number: int, host: str, roster_file: str | None) -> None:
        self._roster_file = roster_file
        self._visitors = Visitors(Listener(host))
        self.me = Member(number, self._visitors.handle)
        self.roster = Roster(-1, ())

    def meet_all(self, exchange: Exchange, timeout_s: float) -> None:
        """Learn the ranks of a job that begins; a collective.

        Args:
            exchange: Among all of them, in the order of their numbers.
            timeout_s: Its time-out.
        """
        mine = json.dumps([self.me.number, str(self.me.handle)]).encode()
        read = [json.loads(blob) for blob in exchange(mine, timeout_s)]
        members = (Member(int(number), Handle.parse(handle)) for number, handle in read)
        self.roster = Roster(0, tuple(sorted(members)))

    def expect(self, handles: Sequence[Handle]) -> None:
        """Learn the ranks of a group whose addresses were exchanged by other means.

        Args:
            handles: Those of all ranks, by rank; each of them expects the same.

        Raises:
            ValueError: This process is not among them, or one is twice.
        """
        if len({*handles}) < len(handles) or self.me.handle not in handles:
            raise ValueError(
                f"{len(handles)} handles, and this process's ({self.me.handle.where}) is not among "
                "them, or one of them is there twice. Hint: pass each rank's handle once."
            )
        self.roster = Roster(0, tuple(Member(rank, handle) for rank, handle in enumerate(handles)))
        self.me = self.roster.members[handles.index(self.me.handle)]

    def invite(self, handles: Iterable[Handle]) -> None:
        """Learn the addresses of ranks of a job that this process is to join.

        It also learns those in the launcher's file: since this process was started, the given ones
        may all have ended.
        """
        now = latest(self._roster_file)
        known = dict.fromkeys([*(now.handles if now else ()), *handles])
        self.roster = Roster(-1, tuple(Member(i, handle) for i, handle in enumerate(known)))

    def waiting(self) -> int:
        """Number of processes that wait to join, as this one knows; never blocks."""
        self._visitors.look()
        return self._visitors.tell_joining(self.roster)

    def regroup(
        self,
        form: Callable[[Meeting], T],
        timeout_s: float,
        missed: Collection[int],
        terms: Terms,
    ) -> T:
        """Find those that go on, and make what they share; a collective of all that are left.

        Args:
            form: Makes it from a meeting; repeated if another rank is lost meanwhile.
            timeout_s: How long to wait for ranks that are not known to have ended.
            missed: Numbers of ranks that did not take part in an operation. They are waited for
                only for half a second.
            terms: How many ranks are needed, whether others may join, and the group's name.

        Returns:
            What `form` returned.

        Raises:
            RendezvousError: The others have gone on without this rank.
            RendezvousTimeoutError: Too few are left.
        """
        deadline = Deadline(timeout_s)
        suspects = {m.handle for m in self.roster.members if m.number in missed}
        late: set[Handle] = set()
        while True:
            with closing(self._meet(suspects, deadline, terms)) as meeting:
                try:
                    made = form(meeting)
                    if meeting.rank == 0:
                        note(self._roster_file, meeting.roster)
                    return made
                except (PeerLostError, RendezvousTimeoutError) as error:
                    suspects = set()
                    if isinstance(error, RendezvousTimeoutError):  # others have ended, or come
                        suspects = {self.roster.members[rank].handle for rank in error.ranks}
                    if deadline.expired and suspects <= late:
                        raise
                    if deadline.expired:  # go on without those that were late
                        late |= suspects
                        deadline = Deadline(timeout_s)

    def _meet(self, suspects: Collection[Handle], deadline: Deadline, terms: Terms) -> Meeting:
        numbers = tuple(member.number for member in self.roster.members)
        shown = numbers.index(self.me.number) if self.me.number in numbers else 0
        names = RankNames(terms.name, max(1, len(numbers)), numbers or None)
        left = Deadline(deadline.remaining_s)
        left.timeout_s = deadline.timeout_s
        attempt = Regrouping(self.me, self.roster, self._visitors, suspects, left, terms)
        with RendezvousContext(shown, names, deadline).raising_errors():
            meeting = attempt.run()
        self.roster = meeting.roster
        self.me = self.roster.members[meeting.rank]
        return meeting

    def close(self) -> None:
        """Refuse connections from now on: to the others, this process has ended."""
        self._visitors.close()
