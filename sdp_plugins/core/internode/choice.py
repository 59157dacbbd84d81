"""Which network a job has between its nodes, as far as can be told without touching it."""

from __future__ import annotations

import warnings

from ..config import Config
from ..environment import environment
from ..launchers import ENVIRONMENT, HYDRA, OPEN_MPI, PMIX, Environment, first_set
from ..rendezvous import EnvExchange, Exchange
from ..rendezvous.failure import NODES_HINT
from ..topology import Topology
from . import mpi, mpi_library
from .transport import Network

# Where ranks of other machines would look for rank 0 on their own.
_HERE = ("127.0.0.1", "localhost", "::1")


def mpi_is_there(env: Environment | None = None) -> bool:
    """Whether mpirun, or what does the same, has started this job's ranks, and mpi4py is installed.

    torchrun inside mpirun hands mpirun's variables down to ranks that are not MPI's.
    """
    given = environment() if env is None else env
    if not mpi_library.installed() or first_set(given, ("TORCHELASTIC_RUN_ID",)):
        return False
    job = ENVIRONMENT.read(given)
    places = [launcher.read(given) for launcher in (OPEN_MPI, HYDRA, PMIX)]
    return any(place.rank is not None and not place.contradicts(job) for place in places)


def _warn_of_others(topology: Topology) -> None:
    """It may be that they share memory with this rank, but hardly ever is."""
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
    """How the ranks of a job meet that have nothing but their variables.

    Args:
        topology: This rank's place.
        name: Of the group.
        config: Settings.
    """
    if config.internode == "gloo":
        raise ValueError(
            "SDP_INTERNODE=gloo is for PyTorch's groups; without a framework there is only mpi."
        )
    rank, size = topology.rank, topology.world_size
    if size == 1 or not mpi_is_there():
        # A launcher may play hosts on one machine, each with some of the ranks.
        if topology.local_size < size and environment().get("MASTER_ADDR") not in _HERE:
            _warn_of_others(topology)
        return EnvExchange(topology, name), None
    if topology.local_size == size:
        return EnvExchange(topology, name), mpi.MpiNetwork()
    return mpi.MpiExchange(rank, size), mpi.MpiNetwork()
