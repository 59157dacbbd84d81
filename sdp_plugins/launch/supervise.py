"""Watching the ranks of a job until the last has ended, and ending them when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from types import FrameType

from sdp_plugins.launch import report
from sdp_plugins.launch.output import Sink, Stream, sinks
from sdp_plugins.launch.pump import Pump, signals_handled, signals_held_back
from sdp_plugins.launch.sessions import Guardian, kill_sessions
from sdp_plugins.launch.spawn import JobSpec, RankProcess, child_setup, job_environment, start_rank

TERMINATE_GRACE_S = 5.0  # from SIGTERM to SIGKILL
INTERRUPT_GRACE_S = 15.0  # from Ctrl-C to SIGTERM: a script may save a checkpoint
DRAIN_S = 1.0
TIMED_OUT = 124  # as timeout(1)
BROKEN_PIPE = 128 + signal.SIGPIPE


class Supervisor:
    """One job: its ranks, their output, and the steps towards their end."""

    def __init__(self, stdout: Sink, stderr: Sink, timeout_s: float | None) -> None:
        self.stdout, self.stderr = stdout, stderr
        self.guardian = Guardian()
        self.pump = Pump()
        self.ranks: list[RankProcess] = []
        self.running: dict[int, RankProcess] = {}
        self.errors: dict[int, Stream] = {}  # each rank's stderr
        self.first: tuple[RankProcess, int] | None = None  # the first to fail, and its exit code
        self.signals: list[int] = []  # received by us, in order
        self.timed_out = False
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.steps: list[tuple[float, int]] = []  # when to send which signal to all that still run

    def start(self, job: JobSpec, *, prefix: bool) -> None:
        """Start all ranks; a signal that comes meanwhile finds all of them."""
        environment = job_environment(job, os.environ)
        with signals_held_back() as mask:
            setup = child_setup(mask)
            for number in range(job.world_size):
                rank = start_rank(job, number, environment, setup)
                self.guardian.watch(rank.pid)
                self.ranks.append(rank)
                self.running[number] = rank
                text = f"[rank {number}] " if prefix else ""
                self.pump.add(rank.stdout, text, self.stdout)
                self.errors[number] = self.pump.add(rank.stderr, text, self.stderr)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass the first signal on; kill at the second. Runs as a signal handler."""
        self.signals.append(number)
        if len(self.signals) > 1:
            self.signal_all(signal.SIGKILL)
        elif number == signal.SIGINT:
            self.signal_all(signal.SIGINT)
            self.end_all(time.monotonic() + INTERRUPT_GRACE_S)
        else:
            self.end_all(time.monotonic())

    def end_all(self, when: float) -> None:
        """Plan SIGTERM and, a grace later, SIGKILL for all that still run."""
        self.steps = [(when, signal.SIGTERM), (when + TERMINATE_GRACE_S, signal.SIGKILL)]

    def signal_all(self, number: int) -> None:
        """Signal the ranks that still run."""
        for rank in list(self.running.values()):
            with suppress(ProcessLookupError):
                rank.send(number)

    def watch(self) -> None:
        """Return when every rank has ended."""
        while self.running:
            times = [when for when, _ in self.steps[:1]]
            times += [] if self.deadline is None else [self.deadline]
            self.pump.run_once(min(times, default=None))
            self.take_steps(time.monotonic())
            self.collect()

    def take_steps(self, now: float) -> None:
        """Notice the time-out, and send the signals that are due."""
        if self.deadline is not None and self.deadline <= now:
            self.deadline = None
            if not self.steps:
                self.timed_out = True
                left = ", ".join(str(rank) for rank in sorted(self.running))
                self.stderr.announce(f"sdp run: the time is up; still running: rank {left}")
                self.end_all(now)
        while self.steps and self.steps[0][0] <= now:
            self.signal_all(self.steps.pop(0)[1])

    def collect(self) -> None:
        """Take the ranks that have ended off the list; the first failure ends the others."""
        codes = {number: rank.exit_code() for number, rank in self.running.items()}
        for number, code in codes.items():
            if code is not None:
                del self.running[number]
        failed = [number for number, code in codes.items() if code]
        if failed and self.first is None:
            for number in failed:
                self.pump.read(self.errors[number])
            # Of several at once, not one that only says that it lost another.
            number = min(failed, key=lambda n: (report.secondary(self.errors[n].tail), n))
            self.first = (self.ranks[number], codes[number] or 0)
            if not self.steps:
                self.end_all(time.monotonic())

    def close(self) -> None:
        """Kill what is left of the ranks' sessions, show the last output, reap."""
        kill_sessions({rank.pid for rank in self.ranks})
        with suppress(BrokenPipeError):
            self.pump.finish(DRAIN_S)
        for rank in self.ranks:
            rank.close()
        self.pump.close()
        self.guardian.dismiss()

    def conclude(self) -> int:
        """Say what went wrong, if anything; the exit code of the job."""
        if len(self.signals) > 1:
            return 128 + self.signals[-1]
        if self.timed_out:
            return TIMED_OUT
        if self.first is None:
            return 0
        rank, code = self.first
        if not self.signals:
            self.stderr.announce(
                report.failure(rank.rank, rank.pid, code, self.errors[rank.rank].tail)
            )
        return code


def run_job(job: JobSpec, *, timeout_s: float | None = None, prefix: bool = True) -> int:
    """Run a job to its end; the exit code for the launcher.

    That is 0, the exit code of the first rank that failed (128 + n if signal n ended it), or 124
    when the time was up.
    """
    supervisor = Supervisor(*sinks(), timeout_s)
    with signals_handled(supervisor.on_signal, supervisor.pump):
        try:
            supervisor.start(job, prefix=prefix)
            supervisor.watch()
        except BrokenPipeError:  # whoever read our output has left
            return BROKEN_PIPE
        except (OSError, subprocess.SubprocessError) as error:
            supervisor.stderr.announce(f"sdp run: cannot start the ranks: {error}")
            return 1
        finally:
            supervisor.close()
        return supervisor.conclude()
