"""The ranks of a job on this machine: children of the launcher."""

from __future__ import annotations

import os

from sdp_plugins.launch.output import Stream
from sdp_plugins.launch.sessions import Reaper, kill_sessions
from sdp_plugins.launch.spawn import (
    JobSpec,
    RankProcess,
    child_setup,
    job_environment,
    start_process,
)
from sdp_plugins.launch.worker_group import OutputSinks, StartContext


class LocalRanks:
    """A worker group of child processes, each the leader of a session.

    Args:
        job: What to start.
    """

    def __init__(self, job: JobSpec) -> None:
        self.job = job
        self.reaper: Reaper | None = None
        self.ranks: list[RankProcess] = []
        self.errors: dict[int, Stream] = {}

    def start(self, output: OutputSinks, context: StartContext) -> bool:
        """Start all ranks; False if the job ended before all were started."""
        self.reaper = reaper = Reaper()
        environment = job_environment(self.job, self.job.environment or os.environ)
        environment |= self.job.more
        setup = child_setup(context.mask)
        for number in range(self.job.world_size):
            if context.is_over():
                return False
            place = {"RANK": str(number), "LOCAL_RANK": str(number)}
            # Only rank 0 has the launcher's stdin.
            rank = start_process(self.job.argv(), environment | place, setup, stdin=number == 0)
            self.ranks.append(rank)
            reaper.watch(rank.pid)
            errors = output.stream(number, output.stderr)
            output.loop.read_from(rank.stdout, output.stream(number, output.stdout))
            self.errors[number] = output.loop.read_from(rank.stderr, errors)
        return True

    def note_losses(self) -> None:
        """Every rank here reports its end."""

    def launch_failure(self) -> None:
        """None: the end of a child is a signal."""

    def due(self) -> float | None:
        """Never: a child's end is a signal."""
        return None

    def kill(self) -> None:
        """Kill all processes in the ranks' sessions."""
        kill_sessions({rank.pid for rank in self.ranks})

    def reap(self) -> None:
        """Reap the ranks."""
        for rank in self.ranks:
            rank.close()
        if self.reaper:
            self.reaper.dismiss()
