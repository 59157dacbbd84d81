"""The ranks of a job on this machine: children of the launcher."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from sdp_plugins.launch.event_loop import EventLoop
from sdp_plugins.launch.job_environment import job_environment
from sdp_plugins.launch.numa import cores_of_ranks
from sdp_plugins.launch.sessions import Reaper, kill_sessions
from sdp_plugins.launch.spawn import RankProcess, child_setup, start_process
from sdp_plugins.launch.terminal import columns, open_ends, resize
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

    _loop: EventLoop  # since `start`, as is the next
    _output: Sequence[RankOutput]

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
        self._mask: Iterable[int] = ()
        self._started: dict[str, str] = {}
        self._cores: list[set[int]] = []

    def start(
        self,
        loop: EventLoop,
        output: Sequence[RankOutput],
        mask: Iterable[int],
        is_over: Callable[[], bool],
    ) -> bool:
        """Start all ranks; False if the job ended before all were started."""
        self._reaper, self._mask = Reaper(), mask
        self._loop, self._output = loop, output
        self._started = job_environment(
            self._environment, self.world_size, self._threads, self._job_id
        )
        self._cores = cores_of_ranks(self.world_size, self._started)
        for number in range(len(output)):
            if is_over():
                return False
            self.ranks.append(self._start(number, {}))
        return True

    def start_again(self, number: int, extra: Mapping[str, str]) -> RankProcess:
        """Start a process in the place of a rank that has ended; that one's session is killed.

        Args:
            number: The rank.
            extra: Variables that only this process has.
        """
        kill_sessions({self.ranks[number].pid})
        for stream in self._output[number]:
            if stream.source:
                self._loop.read(stream.source)
                self._loop.drop_source(stream.source)
            stream.flush()
        self.ranks[number].close()
        if self._reaper:
            self._reaper.forget(self.ranks[number].pid)
        self.ranks[number] = self._start(number, extra)
        return self.ranks[number]

    def _start(self, number: int, extra: Mapping[str, str]) -> RankProcess:
        assert self._reaper
        output = self._output[number]
        place = {"RANK": str(number), "LOCAL_RANK": str(number)}
        setup = child_setup(self._mask, self._cores[number])
        environment = {**self._started, **place, **extra}
        stdin = subprocess.DEVNULL if number else None  # only rank 0 has the launcher's
        ends: Callable[[], tuple[int, int]] = os.pipe
        if self._has_terminal(number):
            ends = partial(open_ends, *self._terminal())
            environment |= columns(environment, *self._terminal())
        rank = start_process(self._command, environment, setup, stdin=stdin, open_ends=ends)
        self._reaper.watch(rank.pid)
        self._loop.read_from(rank.stdout, output.stdout)
        self._loop.read_from(rank.stderr, output.stderr)
        return rank

    def _has_terminal(self, number: int) -> bool:
        """Whether a rank draws for the launcher's terminal; one set of bars is enough."""
        return number == 0 and all(stream.sink.terminal for stream in self._output[0])

    def _terminal(self) -> tuple[int, int]:
        """The launcher's terminal, and the columns that a prefix takes."""
        stream = self._output[0].stdout
        return stream.sink.fd, len(stream.prefix.decode())

    def resize(self) -> None:
        """Let rank 0 know how large the terminal is."""
        if self.ranks and self._has_terminal(0):
            for fd in (self.ranks[0].stdout, self.ranks[0].stderr):
                resize(fd, *self._terminal())

    def kill(self) -> None:
        """Kill all processes in the ranks' sessions."""
        kill_sessions({rank.pid for rank in self.ranks})

    def reap(self) -> None:
        """Reap the ranks."""
        for rank in self.ranks:
            rank.close()
        if self._reaper:
            self._reaper.dismiss()
