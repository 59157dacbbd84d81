"""`sdp run --elastic`: the job goes on when ranks are lost, and others take their places."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import typer

from sdp_plugins.core.config import JOIN
from sdp_plugins.core.regroup.roster import Roster
from sdp_plugins.launch.elastic_workers import ElasticRanks, ElasticWorkers, Loss
from sdp_plugins.launch.event_loop import signals_blocked
from sdp_plugins.launch.report import FailedRank, FailureOrigin, how_it_ended, killed_by
from sdp_plugins.launch.supervise import Options, Supervisor
from sdp_plugins.launch.worker_group import Ending

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
            raise typer.BadParameter(
                f"--elastic takes MIN:MAX, such as 2:4, with 1 <= MIN <= MAX, not {text!r}"
            )
        return cls(int(low), int(high), restarts)


class ElasticSupervisor(Supervisor):
    """Starts a process in the place of a rank that ends with an error, while others go on.

    The ranks tell the launcher who has made the latest group. One that has been in an earlier one,
    and is left out, has been stopped, or was too late: it is killed.

    Args:
        workers: The ranks.
        limits: How the job may shrink and grow.
        options: Those of ``Supervisor``.
    """

    def __init__(self, workers: ElasticWorkers, limits: Limits, options: Options) -> None:
        super().__init__(workers, **options)
        self.elastic, self.limits = workers, limits
        self.restarts = 0
        self.roster = Roster(-1, ())
        self.tolerated: dict[int, FailedRank] = {}
        self.left_out: dict[int, float] = {}  # when they are killed
        self.lost_at: dict[int, float] = {}
        self.started_in = dict.fromkeys(range(workers.world_size), -1)  # the view, by rank

    def take_steps(self, now: float) -> None:
        """Also read the rosters that the ranks have made."""
        for roster in self.elastic.new_rosters():
            self.take_roster(roster, now)
        for number in [number for number, when in self.left_out.items() if when <= now]:
            del self.left_out[number]
            if number in self.running:
                self.say(f"rank {number} has been left out by the others; ending it")
                self.signal(self.running[number], signal.SIGKILL)
        if self.may_start:
            self.take_returns()
        super().take_steps(now)

    def collect(self, now: float) -> None:
        """Also let the job go on without lost hosts, and end those that join when it has ended."""
        for loss in self.elastic.new_losses():
            self.take_loss(loss, now)
        super().collect(now)
        if self.ended and not self.is_ending:
            for number in self.lost_at.keys() & self.running.keys():
                self.signal(self.running[number], signal.SIGKILL)

    def take_roster(self, roster: Roster, now: float) -> None:
        """Note who is in the latest group; kill those that were in the one before, but no more."""
        if roster.view <= self.roster.view:
            return  # told by another host, too late
        before = {member.number for member in self.roster.members}
        there = {member.number for member in roster.members}
        for number in sorted((before - there) & self.running.keys()):
            if self.started_in[number] < self.roster.view:
                self.left_out[number] = now + LEFT_OUT_GRACE_S
        for number in sorted(there - before):
            if number in self.lost_at:
                took_s = now - self.lost_at.pop(number)
                self.say(f"rank {number} takes part again, after {took_s:.1f} s")
        if len(there) != len(before) and self.roster.view >= 0 and not self.is_ending:
            self.say(f"the job goes on with {len(there)} rank{'s' * (len(there) > 1)}")
        self.roster = roster

    def take_loss(self, loss: Loss, now: float) -> None:
        """Let the others go on without ranks that are lost with their host, if enough are left."""
        for number in loss.ranks:
            del self.running[number]
            self.lost_at.pop(number, None)
            self.left_out.pop(number, None)
        if self.is_ending or self.signals:
            return
        joined = self.running.keys() - self.lost_at.keys()
        if self.roster.view >= 0 and (joined or self.ended) and self.enough_are_left():
            again = loss.may_return and self.may_start
            rest = "Its ranks start again once it answers" if again else "None start there again"
            self.say(f"{loss.text}; the others go on. Hint: {loss.hint}. {rest}")
            return
        few = f"fewer than {self.limits.least} ranks are left"
        text = f"{self.program}: {loss.text}; {few}. Hint: {loss.hint}"
        self.end_by(Ending(text), now)

    @property
    def may_start(self) -> bool:
        """Whether processes may be started in the places of lost ones."""
        is_over = self.is_ending or self.signals or self.ended
        return not is_over and self.restarts < self.limits.restarts

    def take_returns(self) -> None:
        """Start the ranks of lost hosts that answer again."""
        with signals_blocked():
            numbers = self.elastic.new_returns()
        for number in numbers:
            if self.may_start:
                where = self.elastic.ranks[number].where
                self.start_again(number, f"rank {number} starts again {where}")

    def enough_are_left(self) -> bool:
        """Whether the job may go on with the ranks that run, have been started, or have ended."""
        return len(self.running) + len(self.ended) >= self.limits.least

    def note_failure(self, number: int, failure: FailedRank) -> None:
        """Let the others go on, if enough are left or can be started; else end the job."""
        others = self.running.keys() - self.lost_at.keys() - {number}  # which hold the job's state
        self.left_out.pop(number, None)
        if self.ended and self.lost_at.pop(number, None) is not None:
            return  # the job has ended before it could join
        # When the others have ended, an error of the last rank's own may be a result that is lost.
        can_go_on = others or (self.ended and killed_by(failure.code))
        how = f"rank {number} ({failure.where}) has ended: {how_it_ended(failure.code)}"
        if self.is_ending or self.signals or self.roster.view < 0 or not can_go_on:
            if not self.is_ending and self.lost_at.keys() - {number} and not self.ended:
                hint = "start the job again, from its last checkpoint"
                self.say(f"{how}; no rank is left that has the job's state. Hint: {hint}")
            self.give_up(number, failure)
            return
        self.tolerated[number] = failure
        if self.may_start and others:
            self.start_again(number, f"{how}; starting another")
        elif self.enough_are_left():
            self.say(f"{how}; the others go on")
        else:
            self.say(f"{how}; fewer than {self.limits.least} ranks are left")
            self.end_all(time.monotonic())  # they do not fail by themselves, but would train on
            self.give_up(number, failure)

    def give_up(self, number: int, failure: FailedRank) -> None:
        """End the job; those that were lost before may be the cause of an error of this rank.

        A process that has not joined has nothing to say but that there is no job any more.
        """
        if self.signals:
            self.tolerated.clear()
        if number in self.lost_at:
            failure = self.tolerated.pop(number, failure)
        if failure.kind is not FailureOrigin.OWN:
            self.failed |= self.tolerated
        self.tolerated.clear()
        super().note_failure(number, failure)

    def start_again(self, number: int, why: str) -> None:
        """Start a process that joins the job, and say so."""
        self.restarts += 1
        self.lost_at.setdefault(number, time.monotonic())
        self.say(f"{why} ({self.restarts} of {self.limits.restarts})")
        handles = ",".join(map(str, self.roster.handles))
        with signals_blocked():
            self.running[number] = self.elastic.start_again(number, {JOIN: handles})
        for stream in self.output[number]:
            stream.tail.clear()
        self.started_in[number] = self.roster.view


def local_supervisor(
    command: Sequence[str],
    limits: Limits,
    environment: Mapping[str, str],
    threads: int | None,
    job_id: str,
    options: Options,
) -> ElasticSupervisor:
    """Make the supervisor of an elastic job on this machine."""
    workers = ElasticRanks(command, limits.most, environment, threads, job_id)
    return ElasticSupervisor(workers, limits, options)
