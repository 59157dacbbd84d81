"""Watches the ranks of a job until the last one ends, and ends all when one fails."""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import closing, suppress
from types import FrameType
from typing import TypedDict

from sdp_plugins.core import stack_dump
from sdp_plugins.core.program_start import open_standard_streams
from sdp_plugins.core.rank_names import name_ranks
from sdp_plugins.launch.event_loop import (
    ASKED,
    FORWARDED,
    EventLoop,
    signals_blocked,
    signals_handled,
)
from sdp_plugins.launch.output import sinks, unblock
from sdp_plugins.launch.report import FailedRank, FailureOrigin, blamed, described
from sdp_plugins.launch.status import Status
from sdp_plugins.launch.who_waits import who_waits
from sdp_plugins.launch.worker_group import Ending, Rank, RankOutput, WorkerGroup

SURVIVOR_GRACE_S = 2.0  # from a failure to SIGTERM: the other ranks detect it and end
TERMINATE_GRACE_S = 3.0  # from SIGTERM to SIGKILL, unless the launcher received SIGTERM
CAUSE_GRACE_S = 1.0  # from the end of a rank that gives no cause of its own to the end of the cause
NAMED_GRACE_S = 10.0  # the same, if the rank names the cause, and that one runs
SAVE_GRACE_S = 15.0  # after a signal to the launcher: a script may save a checkpoint
STACKS_S = 2.0  # after a time-out, until SIGTERM: the ranks write their Python stacks
DRAIN_S = 1.0  # limit for forwarding the last output after a signal or a time-out
TIMED_OUT = 124  # the exit code of timeout(1)
BROKEN_PIPE = 128 + signal.SIGPIPE


class Options(TypedDict):
    """Arguments of ``Supervisor`` that a user chooses."""

    timeout_s: float | None
    prefix: bool
    status: bool


class Supervisor:
    """One job: its ranks, their output, and the steps towards their end.

    Args:
        workers: The ranks.
        timeout_s: Seconds after which the job is ended; None: no limit.
        prefix: Whether every line of output begins with its rank.
        status: Whether to show the state of each rank on a terminal.
        program: The command that the user called; the launcher's lines begin with it.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        *,
        timeout_s: float | None = None,
        prefix: bool = True,
        status: bool = False,
        program: str = "sdp run",
    ) -> None:
        open_standard_streams()
        unblock(1)
        unblock(2)
        self.workers = workers
        self.program = program
        self.stdout, self.stderr = sinks()
        self.status = Status(self.stderr) if status and self.stderr.terminal else None
        self.loop = EventLoop(self.stdout, self.stderr)
        self.output = [self.streams(rank, prefix) for rank in range(workers.world_size)]
        self.running: dict[int, Rank] = {}
        self.failed: dict[int, FailedRank] = {}  # in order, until one rank is blamed
        self.ended: list[int] = []  # with exit code 0, before any rank failed
        self.first_failure_at: float | None = None
        self.blame_at: float | None = None  # until then, wait for a more likely cause
        self.signals: list[int] = []  # that the launcher received, in order
        self.asked = False  # for what the ranks wait for
        self.time_is_up = False
        self.ending: Ending | None = None  # the first condition that ended the job
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.steps: list[tuple[float, int]] = []  # times and signals for all running ranks

    def run(self) -> int:
        """Run the job to its end.

        Returns:
            The launcher's exit code: 0, that of the rank to blame (128 + n if signal n ended it),
            124 after the time-out, or 1 if the ranks cannot be started or their output cannot be
            written.
        """
        with signals_handled(self.on_signal, self.loop), closing(self.loop):
            with closing(self):
                try:
                    self.start()
                except (OSError, subprocess.SubprocessError) as error:
                    self.ending = Ending(f"{self.program}: cannot start the ranks: {error}")
                else:
                    self.watch()
            code = self.conclude()
            self.deliver()
            return code

    def streams(self, rank: int, prefix: bool) -> RankOutput:
        """Make the streams of a rank's output.

        The prefix replaces the one that torch puts before the lines of a traceback.
        """
        begin, replaced = (f"[rank {rank}] ", f"[rank{rank}]: ") if prefix else ("", "")
        stdout, stderr = (
            self.loop.add_stream(begin, sink, replaced) for sink in (self.stdout, self.stderr)
        )
        return RankOutput(stdout, stderr)

    def start(self) -> None:
        """Start all ranks, unless the job ends before."""
        with signals_blocked() as mask:
            complete = self.workers.start(self.loop, self.output, mask, self.is_over)
            self.running = dict(enumerate(self.workers.ranks))
        if not complete and self.signals:
            self.ending = Ending("", 128 + self.signals[0])

    def is_over(self) -> bool:
        """Whether a signal is pending, or the time is up."""
        late = self.deadline is not None and self.deadline <= time.monotonic()
        waiting = signal.sigpending().intersection(FORWARDED)
        return late or any(signal.getsignal(n) is not signal.SIG_IGN for n in waiting)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward the first signal; kill the ranks at the second. Runs as a signal handler."""
        if number == ASKED:
            self.asked = True
            return
        if number == signal.SIGWINCH:
            self.workers.resize()
            return
        self.signals.append(number)
        if len(self.signals) > 1:
            self.signal_all(signal.SIGKILL)
        elif number == signal.SIGINT:
            self.signal_all(signal.SIGINT)
            self.end_all(time.monotonic() + SAVE_GRACE_S)
        else:
            self.end_all(time.monotonic(), SAVE_GRACE_S)

    @property
    def is_ending(self) -> bool:
        """Whether the ranks are being ended, or are about to be."""
        return bool(self.steps or self.failed or self.ending)

    def end_all(self, when: float, grace_s: float = TERMINATE_GRACE_S) -> None:
        """Schedule SIGTERM and, after a grace period, SIGKILL for all running ranks."""
        self.steps = [(when, signal.SIGTERM), (when + grace_s, signal.SIGKILL)]

    def end_by(self, ending: Ending, when: float) -> None:
        """End the job for a reason other than a rank's failure or a signal."""
        self.ending = ending
        self.end_all(when)

    def signal_all(self, number: int) -> None:
        """Signal all running ranks."""
        for rank in list(self.running.values()):
            self.signal(rank, number)

    def signal(self, rank: Rank, number: int) -> None:
        """Signal a rank, which may have ended."""
        with suppress(ProcessLookupError):
            rank.send(number)

    def say(self, text: str) -> None:
        """Write a line of the launcher."""
        self.stderr.announce(f"{self.program}: {text}")

    def output_lost(self) -> Ending | None:
        """The ending of a job whose output cannot be written; None: it can be."""
        error = self.stdout.error or self.stderr.error
        if error is None or isinstance(error, BrokenPipeError):  # the reader has closed it
            return Ending("", BROKEN_PIPE) if error else None
        return Ending(f"{self.program}: cannot write the ranks' output: {error.strerror}")

    def watch(self) -> None:
        """Return when every rank has ended."""
        if not self.running:  # the job was over before a rank was started
            self.take_steps(time.monotonic())
        while self.running:
            steps = (when for when, _ in self.steps[:1])
            shown = self.status.due() if self.status else None
            times = [*steps, self.deadline, self.blame_at, self.workers.due(), shown]
            self.loop.run_once(min((when for when in times if when is not None), default=None))
            if self.asked:
                self.asked = False
                self.show_ranks()
            self.take_steps(time.monotonic())
            self.collect(time.monotonic())
            if self.status:
                self.status.refresh(self.workers.ranks, self.running, time.monotonic())

    def show_ranks(self) -> None:
        """Print what the ranks wait for, and make each write its Python stacks.

        SIGUSR1 is not forwarded: it would end a rank that has no group yet.
        """
        try:
            self.say(who_waits())
            self.signal_all(stack_dump.NUMBER)
        except Exception as error:  # must not end the job
            self.say(f"cannot read what the ranks wait for: {error}")

    def take_steps(self, now: float) -> None:
        """Check for conditions that end the job, and send the signals that are due."""
        if (lost := self.output_lost()) and not self.is_ending:
            self.end_by(lost, now)
        if self.running:  # else only output is left, and mpirun may end
            self.workers.note_losses()
            if not self.is_ending and (failure := self.workers.launch_failure()):
                self.end_by(Ending(f"{self.program}: {failure.text}", failure.code), now)
        if self.deadline is not None and self.deadline <= now:
            self.deadline, self.time_is_up = None, True
            if not self.is_ending:
                self.say(f"time-out reached; {self.what_is_left()}")
                when = now
                if self.running:
                    self.show_ranks()
                    when = time.monotonic() + STACKS_S  # to read the ranks may have taken seconds
                self.end_by(Ending("", TIMED_OUT), when)
        while self.steps and self.steps[0][0] <= now:
            number = self.steps.pop(0)[1]
            if number == signal.SIGTERM and self.signals and self.running and not self.failed:
                name = signal.Signals(self.signals[0]).name
                self.say(f"received {name}; ending {name_ranks(self.running)}")
            self.signal_all(number)

    def what_is_left(self) -> str:
        """Why the job has not ended."""
        if self.running:
            return f"still running: {name_ranks(self.running)}"
        return "its output has not been read to the end"

    def collect(self, now: float) -> None:
        """Remove ended ranks from the running ones; a failure ends the others."""
        codes = {number: rank.exit_code() for number, rank in self.running.items()}
        for number, code in codes.items():
            if code is None:
                continue
            del self.running[number]
            if code == 0 and not self.failed:
                self.ended.append(number)
            if code and self.ending is None:
                self.note_failure(number, self.described_failure(number, code))
        if self.failed and self.ending is None:
            self.blame(now)

    def described_failure(self, number: int, code: int) -> FailedRank:
        """How a rank failed, with all that it has written."""
        stderr = self.output[number].stderr
        if stderr.source:
            self.loop.read(stderr.source)
        stderr.flush()
        rank = self.workers.ranks[number]
        return FailedRank(code, rank.error(), tuple(stderr.tail), rank.where)

    def note_failure(self, number: int, failure: FailedRank) -> None:
        """Note that a rank has failed, so that the job ends."""
        self.failed[number] = failure

    def blame(self, now: float) -> None:
        """Decide which rank is to blame and end the others.

        A rank that lost another may end before that one does. So the decision waits a moment while
        only ranks have failed that lost another or gave no reason.
        """
        if self.first_failure_at is None:
            self.first_failure_at = now
        named = {rank for failure in self.failed.values() for rank in failure.blames}
        grace_s = NAMED_GRACE_S if named & self.running.keys() else CAUSE_GRACE_S
        self.blame_at = self.first_failure_at + grace_s
        may_wait = self.running and not self.steps and now < self.blame_at
        if may_wait and FailureOrigin.OWN not in {failure.kind for failure in self.failed.values()}:
            return
        number = blamed(self.failed)
        failure = self.failed[number]
        self.blame_at = None
        for rank in failure.absent:
            if rank in self.running:
                self.signal(self.running[rank], stack_dump.NUMBER)
        # A user who has ended the job needs no report.
        text = "" if self.signals else described(self.program, number, failure, self.ended)
        self.ending = Ending(text, failure.code)
        if not self.steps:
            self.end_all(now + SURVIVOR_GRACE_S)

    def deliver(self) -> None:
        """Wait until all output is written; after a signal or the time-out, only briefly."""
        end = time.monotonic() + DRAIN_S
        while self.loop.backlogged():
            hurried = self.signals or self.time_is_up
            if hurried and time.monotonic() >= end:
                break
            self.loop.run_once(end if hurried else self.deadline)
            self.take_steps(time.monotonic())

    def close(self) -> None:
        """Kill remaining processes, show the last output, and reap the ranks."""
        if self.status:
            self.status.close()
        self.workers.kill()
        self.loop.finish(DRAIN_S)
        self.deliver()
        self.workers.reap()

    def conclude(self) -> int:
        """Report a failure, if any; returns the exit code of the job."""
        if len(self.signals) > 1:
            return 128 + self.signals[-1]
        if self.ending is None and self.signals and self.loop.backlogged():
            return 128 + self.signals[-1]  # the user did not wait for all output
        ending = self.ending or self.output_lost() or Ending("", 0)
        if ending.text:
            self.stderr.announce(ending.text)
        return ending.code
