"""Recognizes ranks that mpirun started.

Lightning detects mpirun only by mpi4py. Without mpi4py, or with one made for another MPI, each of
the N processes would start N - 1 more.
"""

from __future__ import annotations

import os
from typing import Any

from sdp_plugins.core.rank_environment import rank_environment
from sdp_plugins.core.topology import Topology


def for_this_launch(environment: Any, elastic: type) -> Any:
    """`environment`, or torchrun's if another launcher has started this process already.

    In the latter case this process gets torchrun's variables; `elastic` is the Lightning package's
    class for them. `environment` is None if neither Lightning nor the user has chosen one.

    Raises:
        ValueError: The ranks run on several nodes, and cannot find rank 0.
    """
    if environment is None or environment.creates_processes_externally:
        return environment
    topology = Topology.from_env()
    if topology.world_size == 1:
        return environment
    # mpirun does not tell where rank 0 runs, and hydra gives the nodes no common number for a port.
    needed = ("MASTER_ADDR", "MASTER_PORT") if topology.source == "hydra" else ("MASTER_ADDR",)
    missing = [name for name in needed if name not in os.environ]
    if topology.local_size < topology.world_size and missing:
        raise ValueError(
            f"{topology.source} started ranks on several nodes, and {' and '.join(missing)} "
            "must be set. Hint: have mpirun export them (-x of Open MPI, -genv of MPICH), or "
            "install mpi4py."
        )
    os.environ.update(rank_environment(topology, os.environ))
    return elastic()
