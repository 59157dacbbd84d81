"""MPI, which connects nodes: mpirun, mpi4py and the library that it loads."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from sdp_plugins.core.internode.mpi_library import WHEELS
from sdp_plugins.doctor.finding import Finding, error, ok, skipped, text_and_remedy, warning
from sdp_plugins.doctor.machine import Machine
from sdp_plugins.launch.answers import answer_of
from sdp_plugins.launch.hosts import LaunchError
from sdp_plugins.launch.hosts import mpirun as mpis

_IMPORT_S = 30.0


def mpirun(machine: Machine) -> Iterator[Finding]:
    """There is one MPI, and its mpirun is that of mpi4py."""
    if not mpis.candidates(machine.environment):
        yield skipped("there is no mpirun: jobs on several hosts use sdp run --elastic or torchrun")
        return
    try:
        found = mpis.find(None, machine.environment)
    except LaunchError as failed:
        text, remedy = text_and_remedy(str(failed))
        problem = error if machine.hosts else warning  # one machine needs no MPI
        yield problem(text, remedy)
    else:
        yield ok(f"mpirun is {found}")


def mpirun_place(machine: Machine) -> Iterator[Finding]:
    """The mpirun in PATH is not of another Python environment."""
    for path in mpis.candidates(machine.environment):
        prefix = path.parent.parent
        is_environment = (prefix / "conda-meta").is_dir() or (prefix / "pyvenv.cfg").is_file()
        if is_environment and path.parent != machine.python.parent:
            yield warning(
                f"{path} belongs to another Python environment than {machine.python}",
                f"activate one environment only, or sdp run --mpirun PATH (now: {prefix})",
            )
            return
    yield ok("mpirun, if any, is the system's or this environment's")


def mpi4py_library(machine: Machine) -> Iterator[Finding]:
    """mpi4py, if it is installed, finds an MPI library; Lightning asks it in every Trainer."""
    if "mpi4py" not in machine.packages:
        yield skipped("mpi4py is not installed")
        return
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
    try:
        done = answer_of([machine.python, "-c", code], machine.environment, _IMPORT_S, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as failed:
        yield error(f"mpi4py cannot be imported ({failed})", "pip install mpich")
        return
    if done.returncode == 0:
        yield ok("mpi4py finds its MPI library")
    else:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        needed = machine.hosts or machine.installed("lightning", "pytorch-lightning")
        problem = error if needed else warning
        yield problem(
            f"mpi4py is installed without a library that it can load ({reason}), and Lightning "
            "fails by it, too",
            "pip install mpich, or pip uninstall mpi4py",
        )


def mpi_packages(machine: Machine) -> Iterator[Finding]:
    """At most one package is an MPI library."""
    found = [name for name in WHEELS if name in machine.packages]
    if len(found) > 1:
        problem = error if machine.hosts else warning
        yield problem(
            f"the packages {' and '.join(found)} are both MPI libraries, and one hides the other",
            f"pip uninstall {' '.join(found)}, then install the one that you want",
        )
    else:
        yield ok(f"{found[0]} is the only MPI package" if found else "no package is an MPI library")
