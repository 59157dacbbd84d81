"""Starts the processes of ranks, which end with the launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from sdp_plugins.core.config import ERROR_FILE
from sdp_plugins.core.error_file import ErrorFile, RankError

PR_SET_PDEATHSIG = 1


def python_line(command: Sequence[str], module: bool) -> list[str]:
    """The command line of a script or module; -u, because Python buffers output to a pipe."""
    return [sys.executable, "-u", *(["-m"] if module else []), *command]


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
class RankProcess:
    """A started rank, which leads its own session."""

    process: subprocess.Popen[bytes]
    stdout: int  # where its output is read
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
        return RankError.parse(self.error_file.read())

    def send(self, number: int) -> None:
        """Send a signal; SIGINT also goes to the rank's children, as from a terminal."""
        if number in (signal.SIGINT, signal.SIGKILL):
            os.killpg(self.pid, number)
        else:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Reap it, and close what its output and its error are read from."""
        with self.process, closing(self.error_file):
            pass


def child_setup(
    mask: Iterable[int],
    cores: Iterable[int] | None = None,
    death_signal: signal.Signals = signal.SIGKILL,
) -> Callable[[], None]:
    """Make the function that a rank calls before its program.

    It makes the rank end with the launcher, and unblocks signals.

    Args:
        mask: Signals that stay blocked.
        cores: Those that it may use; None: the launcher's.
        death_signal: Signal that the kernel sends when the launcher ends.
    """
    prctl = ctypes.CDLL(None).prctl
    launcher = os.getpid()

    def setup() -> None:
        prctl(PR_SET_PDEATHSIG, int(death_signal))
        if os.getppid() != launcher:  # it ended before the kernel knew
            os._exit(1)
        if cores is not None:
            os.sched_setaffinity(0, cores)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return setup


def start_process(
    argv: Sequence[str],
    environment: Mapping[str, str],
    setup: Callable[[], None],
    *,
    stdin: int | None,
    inherit: bool = False,
    open_ends: Callable[[], tuple[int, int]] = os.pipe,
) -> RankProcess:
    """Start a process whose output is read, with an error file.

    Args:
        argv: Its command line.
        environment: All of its variables.
        setup: Called in the process before its program.
        stdin: Its stdin, as for ``subprocess``; None: it inherits the launcher's.
        inherit: Whether it inherits the launcher's inheritable descriptors.
        open_ends: Opens the reading and the writing end of its stdout, and of its stderr.
    """
    error_file = ErrorFile()
    stdout, stderr = open_ends(), open_ends()
    try:
        process = subprocess.Popen(
            argv,
            bufsize=0,
            env={**environment, ERROR_FILE: error_file.path},
            stdin=stdin,
            stdout=stdout[1],
            stderr=stderr[1],
            start_new_session=True,
            preexec_fn=setup,
            close_fds=not inherit,
        )
    except BaseException:
        error_file.close()
        os.close(stdout[0])
        os.close(stderr[0])
        raise
    finally:
        os.close(stdout[1])
        os.close(stderr[1])
    process.stdout = os.fdopen(stdout[0], "rb", 0)  # closed with the process
    process.stderr = os.fdopen(stderr[0], "rb", 0)
    return RankProcess(process, stdout[0], stderr[0], error_file)
