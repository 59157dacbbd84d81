"""The command line of each MPI's mpirun."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from sdp_plugins.launch.hosts.mpirun import INTEL_MPI, MPICH, Mpirun


def mpirun_line(
    mpirun: Mpirun, places: Mapping[str, int], names: Sequence[str], command: Sequence[str]
) -> list[str]:
    """Start `command` so often on each host, one host after the other.

    Args:
        mpirun: Which.
        places: The hosts and their numbers of ranks.
        names: Of variables to pass on.
        command: What to start.
    """
    hosts = ",".join(f"{host}:{slots}" for host, slots in places.items())
    line = [str(mpirun.path)]
    if mpirun.family == INTEL_MPI:  # its list of hosts has no numbers
        return [*line, *_hydra(names), *_in_parts(places, command, lambda host, slots: host)]
    if mpirun.family == MPICH:
        return [*line, *_hydra(names), "-hosts", hosts, "-n", str(sum(places.values())), *command]
    if mpirun.major < 5:  # it would begin with this host, wherever that stands
        described = [*_exported(names), *command]  # its -x is of one part of the line
        parts = _in_parts(places, described, lambda host, slots: f"{host}:{slots}")
        return [*line, *_open_mpi(), *parts]
    ranks = ["-n", str(sum(places.values()))]
    return [*line, *_open_mpi(), *_exported(names), "--host", hosts, *ranks, *command]


def _open_mpi() -> list[str]:
    """Ranks may use all cores: they have more threads than one, and Open MPI would bind them."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [*root, "--map-by", "slot", "--bind-to", "none"]


def _exported(names: Sequence[str]) -> list[str]:
    return [part for name in names for part in ("-x", name)]


def _hydra(names: Sequence[str]) -> list[str]:
    """Without a list hydra would pass on the whole environment."""
    return ["-genvlist", ",".join(names)]


def _in_parts(
    places: Mapping[str, int], command: Sequence[str], host_option: Callable[[str, int], str]
) -> list[str]:
    """A part of the line for each host."""
    line: list[str] = []
    for host, slots in places.items():
        part = ["-n", str(slots), "-host", host_option(host, slots), *command]
        line += [*([":"] if line else []), *part]
    return line
