"""Starts ranks: their environment, and the ties that end them with the launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

from sdp_plugins.core.local_address import free_port
from sdp_plugins.launch.clean_environment import without_launchers
from sdp_plugins.launch.error_file import VARIABLE, ErrorFile, RankError, parsed
from sdp_plugins.launch.huge_pages import huge_pages

PR_SET_PDEATHSIG = 1

Kind = Literal["script", "module", "program"]


def python_line(command: Sequence[str], kind: Kind) -> list[str]:
    """A rank's command line; -u, because Python buffers output to a pipe."""
    if kind == "program":
        return [*command]
    return [sys.executable, "-u", *(["-m"] if kind == "module" else []), *command]


def own_program(entry: str) -> list[str]:
    """The command line that calls a function of this package, given as `module:function`.

    Unlike -m, it does not let modules in the current folder hide Python's own.
    """
    module, _, function = entry.partition(":")
    code = (
        f"import sys; sys.path[:] = sys.path[sys.path[0] == '':]; from {module} import {function}"
    )
    return [sys.executable, "-u", "-c", f"{code}; {function}()"]


@dataclass(frozen=True)
class JobSpec:
    """What to start.

    Attributes:
        command: A Python script, module or any program, and its arguments.
        kind: Which of these the command is.
        world_size: Number of ranks.
        threads: OMP_NUM_THREADS of each rank; None: its share of the cores, unless it is set.
        environment: Environment from which that of the ranks is made; None: this process's.
        more: Variables to add.
        job_id: Unique id of the job.
    """

    command: Sequence[str]
    kind: Kind
    world_size: int
    threads: int | None = None
    environment: Mapping[str, str] | None = None
    more: Mapping[str, str] = field(default_factory=dict)
    job_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def argv(self) -> list[str]:
        """A rank's command line."""
        return python_line(self.command, self.kind)


@dataclass(frozen=True)
class RankProcess:
    """A started rank, which leads its own session."""

    process: subprocess.Popen[bytes]
    stdout: int  # the reading ends of its pipes
    stderr: int
    error_file: ErrorFile

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the rank's session and process group."""
        return self.process.pid

    @property
    def where(self) -> str:
        """Description of the process, for reports."""
        return f"pid {self.pid}"

    @property
    def started(self) -> bool:
        """Whether its program has been started."""
        return True

    def exit_code(self) -> int | None:
        """128 + signal, or the exit status, once it has ended; does not reap it.

        Until it is reaped, the kernel does not reuse its pid, so no other process can be killed.
        """
        state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if state is None:
            return None
        return state.si_status + (0 if state.si_code == os.CLD_EXITED else 128)

    def error(self) -> RankError | None:
        """The exception that ended it; None if it reported none."""
        return parsed(self.error_file.read())

    def send(self, number: int) -> None:
        """Send a signal; SIGINT also goes to the rank's children, as from a terminal."""
        if number in (signal.SIGINT, signal.SIGKILL):
            os.killpg(self.pid, number)
        else:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Reap it and close its pipes."""
        self.process.wait()
        os.close(self.stdout)
        os.close(self.stderr)
        self.error_file.close()


def threads_each(world_size: int) -> int:
    """Threads of each rank, so that all ranks together have one for each core."""
    return max(1, len(os.sched_getaffinity(0)) // world_size)


def job_environment(job: JobSpec, base: Mapping[str, str]) -> dict[str, str]:
    """`base` without other launchers' variables, plus those that are equal on all ranks.

    By TORCHELASTIC_RUN_ID, torch and Lightning recognize that a launcher has started the ranks.
    """
    kept = without_launchers(base) | {
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "SDP_JOB_ID": job.job_id,
        "TORCHELASTIC_RUN_ID": job.job_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    if job.threads is not None:
        kept["OMP_NUM_THREADS"] = str(job.threads)
    kept.setdefault("OMP_NUM_THREADS", str(threads_each(job.world_size)))
    return kept | huge_pages(base)


def child_setup(
    mask: set[signal.Signals], farewell: signal.Signals = signal.SIGKILL
) -> Callable[[], None]:
    """Make the function that a rank calls before its program.

    It makes the rank end with the launcher, and unblocks signals.

    Args:
        mask: Signals that stay blocked.
        farewell: Signal that the kernel sends when the launcher ends.
    """
    prctl = ctypes.CDLL(None).prctl
    launcher = os.getpid()

    def setup() -> None:
        prctl(PR_SET_PDEATHSIG, int(farewell))
        if os.getppid() != launcher:  # it ended before the kernel knew
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return setup


def open_pipe(reading: ExitStack, writing: ExitStack) -> tuple[int, int]:
    """Open a pipe whose ends are closed by these stacks."""
    reader, writer = os.pipe()
    reading.callback(os.close, reader)
    writing.callback(os.close, writer)
    return reader, writer


def start_process(
    argv: Sequence[str],
    environment: Mapping[str, str],
    setup: Callable[[], None],
    *,
    stdin: bool,
    inherit: bool = False,
) -> RankProcess:
    """Start a process with pipes and an error file.

    Args:
        argv: Its command line.
        environment: All of its variables.
        setup: Called in the process before its program.
        stdin: Whether it inherits the launcher's stdin.
        inherit: Whether it inherits the launcher's inheritable descriptors.
    """
    with ExitStack() as ours, ExitStack() as theirs:
        error_file = ErrorFile()
        ours.callback(error_file.close)
        stdout, child_stdout = open_pipe(ours, theirs)
        stderr, child_stderr = open_pipe(ours, theirs)
        process = subprocess.Popen(
            argv,
            env={**environment, VARIABLE: error_file.path},
            stdin=None if stdin else subprocess.DEVNULL,
            stdout=child_stdout,
            stderr=child_stderr,
            start_new_session=True,
            preexec_fn=setup,
            close_fds=not inherit,
        )
        ours.pop_all()  # the RankProcess owns them now
    return RankProcess(process, stdout, stderr, error_file)
