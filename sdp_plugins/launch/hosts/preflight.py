"""Checks, before a job starts, that the other hosts are reachable and have this package."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import sdp_plugins
from sdp_plugins.core.announced import announced
from sdp_plugins.launch.hosts import LaunchError
from sdp_plugins.launch.hosts.diagnosis import explained
from sdp_plugins.launch.hosts.mpirun import Mpirun
from sdp_plugins.launch.sessions import kill_sessions
from sdp_plugins.launch.spawn import child_setup

CONNECT_S, ANSWER_S = 5, 20.0
AT_ONCE = 32
# Variables that replace ssh, in the order in which the MPIs read them.
_AGENTS = {
    True: (
        *("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_ssh_agent"),
        *("OMPI_MCA_plm_rsh_agent", "OMPI_MCA_orte_rsh_agent"),
    ),
    False: ("I_MPI_HYDRA_BOOTSTRAP_EXEC", "HYDRA_LAUNCHER_EXEC"),
}
_OTHER_LAUNCHERS = (
    *("HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP"),
    *("OMPI_MCA_plm", "PRTE_MCA_plm"),
)
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE", "COBALT_JOBID")


def agent(mpirun: Mpirun | None, environment: Mapping[str, str]) -> list[str] | None:
    """The program that reaches a host, usually ssh; None if mpirun uses none.

    Without mpirun it is the first that one of the MPIs would use.
    """
    names = [*_AGENTS[True], *_AGENTS[False]] if mpirun is None else _AGENTS[mpirun.is_open_mpi]
    given = (environment.get(name) for name in names)
    if chosen := next((text for text in given if text), ""):
        # Open MPI takes a list and uses the first that exists.
        return shlex.split(chosen.partition(":")[0])
    if mpirun is None:
        return ["ssh"]
    if any(environment.get(name) not in (None, "", "ssh", "rsh") for name in _OTHER_LAUNCHERS):
        return None
    if any(environment.get(name) for name in _ALLOCATIONS):
        return None
    return ["ssh"]


def check(mpirun: Mpirun | None, hosts: Sequence[str], environment: Mapping[str, str]) -> None:
    """Check that this Python, with this package, starts on each of the hosts but this one.

    Raises:
        LaunchError: It does not start on one of the hosts.
    """
    program = agent(mpirun, environment)
    if program is None:
        return
    for first in range(0, len(hosts), AT_ONCE):
        check_together(program, hosts[first : first + AT_ONCE], environment)


def question(environment: Mapping[str, str]) -> str:
    """The command that a host's shell runs."""
    code = "import sdp_plugins, sdp_plugins.launch.hosts.agent; print(sdp_plugins.__version__)"
    return for_a_shell([sys.executable, "-c", code], environment)


def for_a_shell(python: Sequence[str], environment: Mapping[str, str]) -> str:
    """A command line of Python for the shell of another host, with our PYTHONPATH."""
    path = environment.get("PYTHONPATH", "")
    return shlex.join(["env", f"PYTHONPATH={path}", *python] if path else python)


def reaching(program: Sequence[str], host: str) -> list[str]:
    """The command line that reaches a host, but for the host's command."""
    own = os.path.basename(program[0]) == "ssh"
    # Never ask for a password: several hosts would ask at once.
    options = ["-oBatchMode=yes", f"-oConnectTimeout={CONNECT_S}"] if own else []
    return [*program, *options, host]


def check_together(
    program: Sequence[str], hosts: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Check some hosts, all at once; raises for the first that fails."""
    with ExitStack() as started:
        try:
            asked = {host: started.enter_context(ask(program, host, environment)) for host in hosts}
        except OSError as error:
            raise LaunchError(
                f"{program[0]!r}, by which other hosts are reached, cannot be started "
                f"({error.strerror}). Hint: apt-get install openssh-client."
            ) from None
        started.enter_context(announced(f"sdp run: waiting for {', '.join(hosts)} to answer"))
        end = time.monotonic() + ANSWER_S
        for host, process in asked.items():
            try:
                output, errors = process.communicate(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise LaunchError(
                    f"{host} does not answer {program[0]} in {ANSWER_S:.0f} s. Hint: run "
                    f"`{program[0]} {host}` by hand."
                ) from None
            if process.returncode:
                raise LaunchError(complaint(program[0], host, process.returncode, output, errors))
            version = (output.split() or ["?"])[-1]
            if version != sdp_plugins.__version__:
                raise LaunchError(
                    f"{host} has sdp-plugins {version}, this host {sdp_plugins.__version__}. "
                    "Hint: install the same version on all hosts."
                )


def complaint(program: str, host: str, code: int, output: str, errors: str) -> str:
    """What ssh, or the host's shell, complains of, with a hint."""
    words = errors.strip() or output.strip() or f"exit code {code}"
    return explained(words, host) or (
        f"{program} {host} fails: {words.splitlines()[-1]}. Hint: make "
        f"`{program} {host} true` work without a password."
    )


@contextmanager
def ask(
    program: Sequence[str], host: str, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Start the check of a host, and end it with this context or this process."""
    line = [*reaching(program, host), question(environment)]
    with started(line, environment, subprocess.DEVNULL) as process:
        yield process


@contextmanager
def started(
    line: Sequence[str], environment: Mapping[str, str], stdin: int
) -> Iterator[subprocess.Popen[str]]:
    """Start a program that reaches a host, and end it with this context or this process."""
    process = subprocess.Popen(
        line,
        env=environment,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=child_setup(set()),
    )
    try:
        yield process
    finally:
        kill_sessions({process.pid})
        process.communicate()
