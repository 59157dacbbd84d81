"""The command line of each MPI's mpirun."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from sdp_plugins.launch.hosts.mpirun import INTEL_MPI, OPEN_MPI, Mpirun


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
    if mpirun.family == OPEN_MPI:
        options = _open_mpi(hosts, names)
    elif mpirun.family == INTEL_MPI:
        return [str(mpirun.path), *_hydra(names), *_intel_mpi(places, command)]
    else:
        options = [*_hydra(names), "-hosts", hosts]
    return [str(mpirun.path), *options, "-n", str(sum(places.values())), *command]


def _open_mpi(hosts: str, names: Sequence[str]) -> list[str]:
    """Ranks may use all cores: they have more threads than one, and Open MPI would bind them."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    exported = [part for name in names for part in ("-x", name)]
    return [*root, "--host", hosts, "--map-by", "slot", "--bind-to", "none", *exported]


def _hydra(names: Sequence[str]) -> list[str]:
    """Without a list hydra would pass on the whole environment."""
    return ["-genvlist", ",".join(names)]


def _intel_mpi(places: Mapping[str, int], command: Sequence[str]) -> list[str]:
    """Its list of hosts has no numbers: each host gets a part of the line."""
    line: list[str] = []
    for host, slots in places.items():
        line += [*([":"] if line else []), "-n", str(slots), "-host", host, *command]
    return line
