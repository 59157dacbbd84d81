"""A job: ranks that stay alive and carry out one command at a time.

Every library has a job of its own, so that no two libraries share a process. The ranks of a job
that is not being measured sleep in a socket and use no CPU. The benchmark can therefore alternate
between libraries that cannot share a process, such as two MPIs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.mpi import MpiInstall
from sdp_plugins.launch.job_environment import huge_pages, shared_malloc

START_LIMIT_S = 120.0
CALL_LIMIT_S = 300.0
END_LIMIT_S = 15.0
PACKAGE_ROOT = Path(__file__).resolve().parents[1]

Command = tuple[list[str], Mapping[str, str]]
"""A command line, and its environment variables."""
Start = Callable[[Sequence[list[str]], MpiInstall | None, str], list[Command]]
"""Converts the ranks' command lines, an MPI or None, and a temporary folder into start commands."""


class JobError(RuntimeError):
    """A rank raised an exception, ended, or missed a deadline; the text names rank and cause."""


@dataclass(frozen=True)
class JobSpec:
    """The description of a job.

    Attributes:
        name: The name in messages.
        task: "module:class" that every rank instantiates with its Place; its methods are the
            commands.
        arguments: Further keyword arguments of the class.
        ranks: Number of ranks.
        threads: Threads per rank.
        environment: Variables added to this process's environment.
        mpi: The MPI whose mpiexec starts the ranks; None starts plain processes with torchrun's
            variables.
        start: Starts the ranks; None: `start_here`.
    """

    name: str
    task: str
    ranks: int
    arguments: Mapping[str, object] = field(default_factory=dict)
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    mpi: MpiInstall | None = None
    start: Start | None = None


class Job:
    """A running job and context manager; on exit it ends all its processes."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self._folder = tempfile.TemporaryDirectory(prefix="sdp-bench-")
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the job
        self._shared_fd = os.memfd_create("sdp-bench")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._broken = False
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def call(
        self,
        command: str,
        arguments: Mapping[str, object] | None = None,
        timeout_s: float = CALL_LIMIT_S,
    ) -> list[Any]:
        """Run a method of the task on every rank and return the results in rank order.

        Raises:
            JobError: A rank raised an exception, ended or was late. The job is unusable
                afterwards.
        """
        for connection in self._connections:
            with suppress(BrokenPipeError):  # the rank has ended, which receiving reports
                connection.send((command, dict(arguments or {})))
        return self._collect(command, timeout_s)

    def close(self) -> None:
        """End the ranks, by force if they do not end by themselves."""
        for connection in self._connections:
            connection.close()
        # The ranks of a broken job wait for each other, so do not wait for them.
        deadline = time.monotonic() + (0.0 if self._broken else END_LIMIT_S)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with suppress(ProcessLookupError):  # also ends processes that mpiexec left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._connections, self._processes = [], []
        if self._shared_fd >= 0:
            os.close(self._shared_fd)
            self._shared_fd = -1
        self._output.close()
        self._folder.cleanup()

    def _start(self) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{self._folder.name}/commands")
            listener.listen(self.spec.ranks)
            lines = [self._rank_line(rank) for rank in range(self.spec.ranks)]
            start = self.spec.start or start_here
            for line, variables in start(lines, self.spec.mpi, self._folder.name):
                self._spawn(line, variables)
            self._accept(listener)
        self._collect("start", START_LIMIT_S)

    def _rank_line(self, rank: int) -> list[str]:
        setting = {
            "task": self.spec.task,
            "arguments": dict(self.spec.arguments),
            "folder": self._folder.name,
            "runner_pid": os.getpid(),
            "rank": rank,
            "ranks": self.spec.ranks,
            "threads": self.spec.threads,
            "shared_fd": -1 if self.spec.mpi else self._shared_fd,
        }
        return [sys.executable, "-m", "benchmarks.rank", json.dumps(setting)]

    def _spawn(self, line: list[str], variables: Mapping[str, str]) -> None:
        path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]))
        threads = {"OMP_NUM_THREADS": str(self.spec.threads), "PYTHONPATH": path}
        given = {**os.environ, **threads, **variables, **self.spec.environment}
        process = subprocess.Popen(
            line,
            env=given | huge_pages(given) | shared_malloc(given),  # as under `sdp run`
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=[self._shared_fd],
            start_new_session=True,  # lets close() end exactly the processes that it started
        )
        self._processes.append(process)

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        arrived: dict[int, Connection] = {}
        listener.settimeout(0.2)
        while len(arrived) < self.spec.ranks:
            try:
                connection = Connection(listener.accept()[0].detach())
            except TimeoutError:
                self._watch_start(deadline, arrived)
                continue
            self._connections.append(connection)
            arrived[connection.recv()] = connection
        self._connections = [arrived[rank] for rank in range(self.spec.ranks)]

    def _watch_start(self, deadline: float, arrived: Collection[int]) -> None:
        for rank, process in enumerate(self._processes):
            if rank in arrived and not self.spec.mpi:
                continue  # its output is read once all ranks are connected
            if process.poll() is not None:
                who = "mpiexec" if self.spec.mpi else f"rank {rank}"
                raise self._failure(f"{who} ended with {process.returncode} at its start")
        if time.monotonic() > deadline:
            raise self._failure(f"the ranks did not start in {START_LIMIT_S:.0f} s")

    def _collect(self, command: str, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        answers: dict[int, Any] = {}
        while waiting:
            heard = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not heard:
                late = ", ".join(str(rank) for rank in sorted(waiting.values()))
                raise self._failure(f"{command}: no answer of ranks {late} in {timeout_s:.0f} s")
            for connection in [connection for connection in waiting if connection in heard]:
                rank = waiting.pop(connection)
                answers[rank] = self._receive(connection, command, rank)
        return [answers[rank] for rank in range(self.spec.ranks)]

    def _receive(self, connection: Connection, command: str, rank: int) -> Any:
        try:
            ok, value = connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._failure(f"{command}: rank {rank} ended") from None
        if not ok:
            self._broken = True
            raise JobError(f"{self.spec.name}: {command}: rank {rank}: {value}")
        return value

    def _failure(self, text: str) -> JobError:
        self._broken = True
        self._output.seek(0)
        tail = self._output.read().decode(errors="replace").strip()[-1500:]
        return JobError(f"{self.spec.name}: {text}" + (f"; it wrote:\n{tail}" if tail else ""))


def start_here(lines: Sequence[list[str]], mpi: MpiInstall | None, folder: str) -> list[Command]:
    """Run all ranks on this machine: under mpiexec, or as plain processes."""
    if mpi:
        return [(mpi.command(lines), mpi.environment())]
    job = {"SDP_JOB_ID": uuid.uuid4().hex, "MASTER_ADDR": "127.0.0.1"}
    return [(line, job | _torchrun_variables(rank, len(lines))) for rank, line in enumerate(lines)]


def _torchrun_variables(rank: int, ranks: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_PORT": "29500",  # identifies the job; the ranks meet at a file
    }
