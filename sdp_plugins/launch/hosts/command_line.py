"""The command line of each MPI's mpirun."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from sdp_plugins.launch.hosts.mpirun import INTEL_MPI, MPICH, Mpirun


def mpirun_line(
    mpirun: Mpirun, places: Mapping[str, int], names: Sequence[str], command: Sequence[str]
) -> list[str]:
    """The command line that starts `command` once per rank, one host after the other.

    Args:
        mpirun: The mpirun to use.
        places: The hosts and their numbers of ranks.
        names: Names of the variables to forward.
        command: The command to start.
    """
    hosts = ",".join(f"{host}:{slots}" for host, slots in places.items())
    line = [str(mpirun.path)]
    if mpirun.family == INTEL_MPI:  # its -hosts takes no numbers
        return [*line, *_hydra(names), *_in_parts(places, command, lambda host, slots: host)]
    if mpirun.family == MPICH:
        return [*line, *_hydra(names), "-hosts", hosts, "-n", str(sum(places.values())), *command]
    if mpirun.major < 5:  # it would put this host first, whatever its place
        described = [*_exported(names), *command]  # its -x applies to one part of the line
        parts = _in_parts(places, described, lambda host, slots: f"{host}:{slots}")
        return [*line, *_open_mpi(), *parts]
    ranks = ["-n", str(sum(places.values()))]
    return [*line, *_open_mpi(), *_exported(names), "--host", hosts, *ranks, *command]


def _open_mpi() -> list[str]:
    """Options of Open MPI; --bind-to none, because ranks have several threads."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [*root, "--map-by", "slot", "--bind-to", "none"]


def _exported(names: Sequence[str]) -> list[str]:
    return [part for name in names for part in ("-x", name)]


def _hydra(names: Sequence[str]) -> list[str]:
    """Options of hydra, which would forward the whole environment without a list."""
    return ["-genvlist", ",".join(names)]


def _in_parts(
    places: Mapping[str, int], command: Sequence[str], host_option: Callable[[str, int], str]
) -> list[str]:
    """One part of the line per host."""
    line: list[str] = []
    for host, slots in places.items():
        part = ["-n", str(slots), "-host", host_option(host, slots), *command]
        line += [*([":"] if line else []), *part]
    return line
