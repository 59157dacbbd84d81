"""`ElasticJob`: goes on without ranks that are lost, and with others that join."""

from __future__ import annotations

from collections.abc import Collection
from types import TracebackType

from .addresses_and_ports import LOOPBACK
from .config import Config
from .elastic_state import is_asked
from .errors import SdpError
from .group import Group
from .rank_names import DEFAULT
from .regroup import Handle, Meeting, Participant, Terms
from .rendezvous import EnvExchange
from .topology import Topology


class ElasticJob:
    """The ranks of a job on one node, which may be lost, and joined by others, while it runs.

    ::

        job = ElasticJob.from_env()
        while ...:
            try:
                job.group.all_reduce(array)
            except SdpError:                # on all ranks that are left
                job.regroup()               # array has no defined values

    A lost, stuck or aborted rank fails the group on all ranks, as it fails any group. Those that
    are left then regroup: they find each other by the address at which each of them listens.

    Attributes:
        group: All ranks. It is another one after ``regroup``.
    """

    group: Group

    def __init__(self, participant: Participant, name: str, timeout_s: float) -> None:
        """Use ``from_env``."""
        self._participant = participant
        self._name, self._timeout_s = name, timeout_s

    @classmethod
    def from_env(cls, *, name: str = DEFAULT, timeout_s: float | None = None) -> ElasticJob:
        """Begin the job together with all ranks that the launcher starts, or join it.

        A process joins if ``SDP_JOIN`` has handles of ranks; see ``handles``. ``sdp run --elastic``
        sets it for the processes that replace lost ones.

        Args:
            name: The groups' name.
            timeout_s: Time-out of the rendezvous and of every operation; None: ``SDP_TIMEOUT_S``.
        """
        config, topology = Config.from_env(), Topology.from_env()
        limit_s = config.wait_s if timeout_s is None else timeout_s
        participant = Participant(topology.rank, LOOPBACK, config.roster_file)
        job = cls(participant, name, limit_s)
        try:
            if config.join is None:
                exchange = EnvExchange(topology, f"{name}, handles")
                job._participant.meet_all(exchange, limit_s)
            else:
                job._participant.invite(map(Handle.parse, config.join))
            job._regroup((), limit_s, Terms(name=name))
        except BaseException:
            job._participant.close()
            raise
        return job

    def regroup(
        self, *, minimum: int = 1, timeout_s: float | None = None, admits: bool = True
    ) -> None:
        """Make the group of the ranks that are left, and of those that have asked to join.

        All ranks that are left call it: after an error, or when they have agreed to, because
        ``waiting`` was positive on one of them. The old group is closed. Its ranks keep their
        numbers in the job (``global_ranks``), which order the new one's; one that joins may have
        that of a lost rank.

        A rank has ended if its host refuses connections. One that runs, but was missed by the
        operation that failed, has half a second to come; others have the time-out.

        Args:
            minimum: Fewer ranks wait for others to join.
            timeout_s: For ranks that are not known to have ended; None: the job's.
            admits: Whether others may join.

        Raises:
            RendezvousError: The others have gone on without this rank.
            RendezvousTimeoutError: Too few ranks are left: less than the minimum, or not more than
                half of those that are not known to have ended.
        """
        failure = self.group.failure
        self.group.close()
        missed = failure.global_ranks if isinstance(failure, SdpError) else ()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        self._regroup(missed, limit_s, Terms(minimum, admits, self._name))

    def _regroup(self, missed: Collection[int], timeout_s: float, terms: Terms) -> None:
        config = Config.from_env()

        def form(meeting: Meeting) -> Group:
            return Group.from_exchange(
                meeting, meeting.rank, meeting.names, self._timeout_s, None, config
            )

        self.group = self._participant.regroup(form, timeout_s, missed, terms)

    def waiting(self) -> int:
        """Number of processes that ask to join, as far as this rank knows; does not wait."""
        return self._participant.waiting()

    def is_asked(self) -> bool:
        """Return whether a process asks to join, as far as any rank knows; a collective."""
        return is_asked(self.group, self.waiting())

    @property
    def handles(self) -> list[str]:
        """The addresses of all ranks, for ``SDP_JOIN``. They are secret: who has one can join."""
        return list(map(str, self._participant.roster.handles))

    def leave(self) -> None:
        """Take part in no other group: to the others, this rank has ended."""
        self._participant.close()

    def close(self) -> None:
        """Leave the job and its group."""
        self.group.close()
        self.leave()

    def __enter__(self) -> ElasticJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.group.__exit__(kind, error, traceback)  # which tells the others of the error
        self.leave()
