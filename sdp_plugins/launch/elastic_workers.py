"""The ranks of an elastic job, as its supervisor sees them, and those on this machine."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sdp_plugins.core.config import ROSTER_FILE
from sdp_plugins.core.regroup.roster import Roster
from sdp_plugins.core.regroup.roster_file import RosterFile
from sdp_plugins.launch.local_ranks import LocalRanks
from sdp_plugins.launch.worker_group import Rank, WorkerGroup

LOOK_S = 0.5  # between two reads of the rosters


class Loss(NamedTuple):
    """Ranks that nobody can tell of any more.

    Attributes:
        ranks: Their numbers.
        text: What is lost.
        hint: The remedy.
        may_return: Whether processes can be started there again.
    """

    ranks: Sequence[int]
    text: str
    hint: str
    may_return: bool


class ElasticWorkers(WorkerGroup):
    """A worker group in which processes can be started in the places of those that have ended."""

    @abstractmethod
    def new_rosters(self) -> list[Roster]:
        """The rosters that the ranks have made since the last call."""

    def new_losses(self) -> list[Loss]:
        """The ranks that were lost since the last call, with their hosts; by default none."""
        return []

    def new_returns(self) -> list[int]:
        """The lost ranks that can be started again since the last call; by default none."""
        return []

    @abstractmethod
    def start_again(self, number: int, extra: Mapping[str, str]) -> Rank:
        """Start a process in the place of a rank that has ended, with variables of its own."""

    def due(self) -> float:
        """When to look for rosters again."""
        return time.monotonic() + LOOK_S


class ElasticRanks(LocalRanks, ElasticWorkers):
    """The ranks of an elastic job on this machine.

    The ranks tell by a file who has made the latest group.

    Args:
        command: A rank's command line.
        world_size: Number of ranks.
        environment: Environment from which that of the ranks is made.
        threads: OMP_NUM_THREADS of each rank, as of ``LocalRanks``.
        job_id: Unique id of the job.
    """

    def __init__(
        self,
        command: Sequence[str],
        world_size: int,
        environment: Mapping[str, str],
        threads: int | None,
        job_id: str,
    ) -> None:
        self._rosters = RosterFile()
        environment = {**environment, ROSTER_FILE: self._rosters.path}
        super().__init__(command, world_size, environment, threads=threads, job_id=job_id)

    def new_rosters(self) -> list[Roster]:
        """The rosters that have been added to the file."""
        return self._rosters.new()
