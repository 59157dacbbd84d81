"""Runs one job: starts its ranks, injects the fault, and waits for all ends."""

from __future__ import annotations

import random
import signal
import time

import torch.distributed as dist

from stress.chaos.jobs import SIGNALS, Job
from stress.chaos.leftovers import Leftovers
from stress.chaos.promises import EXIT_S, LONGEST_S, Fate, Verdict, judge, victim_has_to_end
from stress.chaos.rank import run_rank
from tests.forked import forks_of
from tests.rank import Rank
from tests.ranks import Ranks, spawn

START_S = 60.0


class Play:
    """One job, controlled by the process that starts its ranks."""

    def __init__(self, job: Job, ranks: Ranks) -> None:
        self.job, self.ranks = job, ranks
        self.fates = [Fate() for _ in ranks]
        self.heard: list[dict[str, float]] = [{} for _ in ranks]
        self.fault_at = self.resumed_at = 0.0
        self.stopped: tuple[int, ...] = ()  # never waited for

    def play(self) -> None:
        """Run the whole job."""
        job = self.job
        if job.fault in SIGNALS:
            self.until_all_have_said({"start": "here", "end": "leaving"}.get(job.life, "going"))
            jitter = random.random() * 0.03 if job.life == "end" else job.moment_s
            self.listen_for(jitter)
            self.strike()
        self.listen_for(job.timeout_s + job.pause_s + START_S, until_ended=True)
        for rank in self.ranks:
            if not self.is_over(rank.rank):
                rank.kill(signal.SIGUSR2)  # makes it write its stacks
                time.sleep(0.3)

    def strike(self) -> None:
        job = self.job
        self.fault_at = time.monotonic()
        for victim in job.victims:
            self.send(victim, signal.SIGKILL if job.fault == "kill" else signal.SIGSTOP)
        if job.fault in ("pause", "stop and continue"):
            self.stopped = job.victims
            self.listen_for(job.pause_s)
            if job.fault == "stop and continue" and job.life != "end":
                self.until_one_has_failed()  # on a busy machine the others start to wait later
            self.resumed_at = time.monotonic()
            for victim in job.victims:
                self.send(victim, signal.SIGCONT)
            self.stopped = ()

    def send(self, victim: int, number: int) -> None:
        self.ranks[victim].kill(number)

    def until_all_have_said(self, word: str) -> None:
        end = time.monotonic() + START_S
        first = word == "leaving"
        while time.monotonic() < end:
            said = [word in heard for heard in self.heard]
            if any(said) if first else all(said):
                return
            if all(fate.exited_at for fate in self.fates):
                return
            self.listen_once(0.01)

    def until_one_has_failed(self) -> None:
        end = time.monotonic() + LONGEST_S
        while time.monotonic() < end and not any(fate.end for fate in self.fates):
            self.listen_once(0.01)

    def listen_for(self, seconds: float, until_ended: bool = False) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if until_ended and all(map(self.is_over, range(self.job.world))):
                return
            self.listen_once(min(0.02, max(0.0, end - time.monotonic())))

    def is_over(self, rank: int) -> bool:
        expected = rank not in self.job.victims or victim_has_to_end(self.job)
        return not expected or bool(self.fates[rank].exited_at)

    def listen_once(self, seconds: float) -> None:
        time.sleep(seconds)
        for rank in self.ranks:
            while self.is_heard(rank.rank) and rank.wait(0):
                self.take(rank)

    def is_heard(self, rank: int) -> bool:
        return rank not in self.stopped and not self.fates[rank].exited_at

    def take(self, rank: Rank) -> None:
        """Process a rank's message, or the end of its process."""
        fate = self.fates[rank.rank]
        rank.receive()
        while rank._said:
            what, value = rank._said.pop(0)
            if what == "end":
                fate.end = value
            self.heard[rank.rank][what] = value if what != "end" else value.at
            if what == "fault":
                self.fault_at = self.fault_at or value
        if rank._outcome is not None:
            fate.exitcode = rank.finish(EXIT_S)
            fate.exited_at = time.monotonic()


def play(job: Job) -> tuple[Verdict, str]:
    """Run a job under the tests' own starter; return the verdict and the ranks' output."""
    before = Leftovers.now()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with spawn(job.world, None, forks_of("stress.chaos.ready")) as ranks:
        ranks.give(run_rank, (job, store.port), {})
        playing = Play(job, ranks)
        playing.play()
        verdict = judge(job, playing.fates, playing.fault_at, playing.resumed_at)
        for rank in ranks:
            if rank.process.poll() is None:
                rank.kill()
                rank.process.wait(EXIT_S)
        verdict.problems += [
            f"rank {rank.rank} left processes" for rank in ranks if rank.left_processes()
        ]
        outputs = "\n".join(f"--- rank {r.rank}\n{r.output()}" for r in ranks)
    verdict.problems += before.since()
    return verdict, outputs
