"""`sdp run --elastic`: the job goes on when ranks are lost, and others take their places."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import typer

from sdp_plugins.core.config import JOIN, ROSTER_FILE
from sdp_plugins.core.regroup.roster import Roster
from sdp_plugins.core.regroup.roster_file import RosterFile
from sdp_plugins.launch.event_loop import FORWARDED
from sdp_plugins.launch.local_ranks import LocalRanks
from sdp_plugins.launch.report import FailedRank, how_it_ended
from sdp_plugins.launch.sessions import kill_sessions
from sdp_plugins.launch.supervise import Options, Supervisor

LOOK_S = 0.5  # between two reads of the rosters
LEFT_OUT_GRACE_S = 1.0  # for a rank that has been left out to say why it ends


class Limits(NamedTuple):
    """How a job may shrink and grow.

    Attributes:
        least: The job ends if fewer ranks are left.
        most: So many ranks start.
        restarts: How many processes are started in the places of lost ones.
    """

    least: int
    most: int
    restarts: int

    @classmethod
    def parse(cls, text: str, restarts: int) -> Limits:
        """Read ``MIN:MAX``.

        Raises:
            typer.BadParameter: The text is something else.
        """
        low, _, high = text.partition(":")
        if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
            raise typer.BadParameter(f"--elastic takes MIN:MAX, such as 2:4, not {text!r}")
        return cls(int(low), int(high), restarts)


class ElasticSupervisor(Supervisor):
    """Starts a process in the place of a rank that ends with an error, while others go on.

    The ranks tell the launcher by a file who has made the latest group. One that has been in an
    earlier one, and is left out, has been stopped, or was too late: it is killed.

    Args:
        workers: The ranks.
        limits: How the job may shrink and grow.
        rosters: The file.
        options: Those of ``Supervisor``.
    """

    def __init__(
        self, workers: LocalRanks, limits: Limits, rosters: RosterFile, options: Options
    ) -> None:
        super().__init__(workers, **options)
        self.local, self.limits, self.rosters = workers, limits, rosters
        self.restarts = 0
        self.roster = Roster(-1, ())
        self.tolerated: dict[int, FailedRank] = {}
        self.left_out: dict[int, float] = {}  # when they are killed
        self.lost_at: dict[int, float] = {}
        self.started_in = dict.fromkeys(range(workers.world_size), -1)  # the view, by rank

    def take_steps(self, now: float) -> None:
        """Also read the rosters that the ranks have made."""
        for roster in self.rosters.new():
            self.take_roster(roster, now)
        for number in [number for number, when in self.left_out.items() if when <= now]:
            del self.left_out[number]
            if number in self.running:
                self.say(f"rank {number} has been left out by the others; ending it")
                self.signal(self.running[number], signal.SIGKILL)
        super().take_steps(now)

    def collect(self, now: float) -> None:
        """Also end those that have not joined when the job has come to its end."""
        super().collect(now)
        if self.ended and not self.is_ending:
            for number in self.lost_at.keys() & self.running.keys():
                self.signal(self.running[number], signal.SIGKILL)

    def take_roster(self, roster: Roster, now: float) -> None:
        """Note who is in the latest group; kill those that were in the one before, but no more."""
        before = {member.number for member in self.roster.members}
        there = {member.number for member in roster.members}
        for number in sorted((before - there) & self.running.keys()):
            if self.started_in[number] < self.roster.view:
                self.left_out[number] = now + LEFT_OUT_GRACE_S
        for number in sorted(there - before):
            if number in self.lost_at:
                took_s = now - self.lost_at.pop(number)
                self.say(f"rank {number} takes part again, after {took_s:.1f} s")
        if len(there) != len(before) and self.roster.view >= 0:
            self.say(f"the job goes on with {len(there)} rank{'s' * (len(there) > 1)}")
        self.roster = roster

    def note_failure(self, number: int, failure: FailedRank) -> None:
        """Let the others go on, if enough are left or can be started; else end the job."""
        others = self.running.keys() - self.lost_at.keys() - {number}  # which hold the job's state
        self.left_out.pop(number, None)
        if self.ended and self.lost_at.pop(number, None) is not None:
            return  # the job has ended before it could join
        if self.is_ending or self.signals or self.roster.view < 0 or not (others or self.ended):
            self.give_up(number, failure)
            return
        self.tolerated[number] = failure
        how = f"rank {number} ({self.workers.ranks[number].where}) has ended: "
        how += how_it_ended(failure.code)
        if self.restarts < self.limits.restarts and others and not self.ended:
            self.restarts += 1
            self.lost_at.setdefault(number, time.monotonic())
            self.say(f"{how}; starting another ({self.restarts} of {self.limits.restarts})")
            self.start_again(number)
        elif len(others) + len(self.ended) >= self.limits.least:
            self.say(f"{how}; the others go on")
        else:
            self.say(f"{how}; fewer than {self.limits.least} ranks are left")
            self.give_up(number, failure)

    def give_up(self, number: int, failure: FailedRank) -> None:
        """End the job; those that were lost before may be the cause.

        A process that has not joined has nothing to say but that there is no job any more.
        """
        if number in self.lost_at:
            failure = self.tolerated.pop(number, failure)
        self.failed |= self.tolerated
        self.tolerated.clear()
        super().note_failure(number, failure)

    def start_again(self, number: int) -> None:
        """Start a process that joins the job."""
        kill_sessions({self.local.ranks[number].pid})
        for stream in self.output[number]:
            if stream.source:
                self.loop.read(stream.source)
                self.loop.drop_source(stream.source)
            stream.flush()
        handles = ",".join(map(str, self.roster.handles))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            self.running[number] = self.local.start_again(
                number, self.loop, self.output[number], {JOIN: handles}
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.started_in[number] = self.roster.view


class ElasticRanks(LocalRanks):
    """The ranks of an elastic job on this machine."""

    def due(self) -> float:
        """When to read the rosters again."""
        return time.monotonic() + LOOK_S


def elastic_supervisor(
    command: Sequence[str],
    size: str,
    restarts: int,
    environment: Mapping[str, str],
    threads: int | None,
    job_id: str,
    options: Options,
) -> ElasticSupervisor:
    """Make the supervisor of an elastic job on this machine; `size` is ``MIN:MAX``."""
    limits, rosters = Limits.parse(size, restarts), RosterFile()
    workers = ElasticRanks(
        command,
        limits.most,
        {**environment, ROSTER_FILE: rosters.path},
        threads=threads,
        job_id=job_id,
    )
    return ElasticSupervisor(workers, limits, rosters, options)
