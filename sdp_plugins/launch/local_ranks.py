"""The ranks of a job on this machine: children of the launcher."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

from sdp_plugins.core.addresses_and_ports import free_port
from sdp_plugins.launch.event_loop import EventLoop
from sdp_plugins.launch.job_environment import huge_pages, torchelastic, without_launchers
from sdp_plugins.launch.sessions import Reaper, kill_sessions
from sdp_plugins.launch.spawn import RankProcess, child_setup, start_process
from sdp_plugins.launch.worker_group import RankOutput, WorkerGroup


class LocalRanks(WorkerGroup):
    """A worker group of child processes, each the leader of a session.

    Args:
        command: A rank's command line.
        world_size: Number of ranks.
        environment: Environment from which that of the ranks is made.
        threads: OMP_NUM_THREADS of each rank; None: its share of the cores, unless it is set.
        job_id: Unique id of the job; None: a new one.
    """

    def __init__(
        self,
        command: Sequence[str],
        world_size: int,
        environment: Mapping[str, str],
        *,
        threads: int | None = None,
        job_id: str | None = None,
    ) -> None:
        self.world_size = world_size
        self.ranks: list[RankProcess] = []
        self._command = command
        self._environment = environment
        self._threads = threads
        self._job_id = job_id or uuid.uuid4().hex
        self._reaper: Reaper | None = None

    def start(
        self,
        loop: EventLoop,
        output: Sequence[RankOutput],
        mask: Iterable[int],
        is_over: Callable[[], bool],
    ) -> bool:
        """Start all ranks; False if the job ended before all were started."""
        self._reaper = reaper = Reaper()
        environment = self._job_environment()
        setup = child_setup(mask)
        for number, (stdout, stderr) in enumerate(output):
            if is_over():
                return False
            place = {"RANK": str(number), "LOCAL_RANK": str(number)}
            # Only rank 0 has the launcher's stdin.
            rank = start_process(self._command, environment | place, setup, stdin=number == 0)
            self.ranks.append(rank)
            reaper.watch(rank.pid)
            loop.read_from(rank.stdout, stdout)
            loop.read_from(rank.stderr, stderr)
        return True

    def _job_environment(self) -> dict[str, str]:
        """The variables that are equal on all ranks, without those of other launchers."""
        kept = without_launchers(self._environment) | {
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "SDP_JOB_ID": self._job_id,
        }
        kept |= torchelastic(self._job_id)
        if self._threads is not None:
            kept["OMP_NUM_THREADS"] = str(self._threads)
        share = max(1, len(os.sched_getaffinity(0)) // self.world_size)
        kept.setdefault("OMP_NUM_THREADS", str(share))
        return kept | huge_pages(kept)

    def kill(self) -> None:
        """Kill all processes in the ranks' sessions."""
        kill_sessions({rank.pid for rank in self.ranks})

    def reap(self) -> None:
        """Reap the ranks."""
        for rank in self.ranks:
            rank.close()
        if self._reaper:
            self._reaper.dismiss()
