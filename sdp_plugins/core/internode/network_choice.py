"""Selects the network between a job's nodes, without initialising it."""

from __future__ import annotations

import warnings

from ..config import Config
from ..environment import environment
from ..launcher_variables import ENVIRONMENT, HYDRA, OPEN_MPI, PMIX, first_set
from ..rendezvous import EnvExchange, Exchange
from ..rendezvous.failure import NODES_HINT
from ..topology import Topology
from . import mpi, mpi_library
from .transport import Network

# Values of MASTER_ADDR by which ranks of other machines could not reach rank 0.
_HERE = ("127.0.0.1", "localhost", "::1")


def mpi_is_there() -> bool:
    """Whether an MPI launcher has started this job's ranks and mpi4py is installed.

    torchrun inside mpirun passes mpirun's variables to ranks that MPI has not started.
    """
    given = environment()
    if not mpi_library.installed() or first_set(given, ("TORCHELASTIC_RUN_ID",)):
        return False
    job = ENVIRONMENT.read(given)
    places = [launcher.read(given) for launcher in (OPEN_MPI, HYDRA, PMIX)]
    return any(place.rank is not None and not place.contradicts(job) for place in places)


def _warn_of_others(topology: Topology) -> None:
    """Warn that ranks of other nodes cannot be reached; they rarely share memory with this one."""
    missing = "" if mpi_library.installed() else ", and mpi4py is not installed"
    warnings.warn(
        f"rank {topology.rank}: {topology.source} says that {topology.local_size} of "
        f"{topology.world_size} ranks are on this node; the others cannot be reached without MPI"
        f"{missing}. Hint: {NODES_HINT}; PyTorch's groups do not need MPI.",
        stacklevel=4,
    )


def for_environment(
    topology: Topology, name: str, config: Config
) -> tuple[Exchange, Network | None]:
    """Select the rendezvous of a job without a framework, and its network; None: it needs none."""
    if config.internode == "gloo":
        raise ValueError(
            "SDP_INTERNODE=gloo is for PyTorch's groups; without a framework there is only mpi."
        )
    rank, size = topology.rank, topology.world_size
    if size == 1 or not mpi_is_there():
        # A launcher may simulate hosts on one machine, each with some of the ranks.
        if topology.local_size < size and environment().get("MASTER_ADDR") not in _HERE:
            _warn_of_others(topology)
        return EnvExchange(topology, name), None
    if topology.local_size == size:
        return EnvExchange(topology, name), mpi.MpiNetwork()
    return mpi.MpiExchange(rank, size), mpi.MpiNetwork()
