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

    In the latter case this process gets torchrun's variables.

    Args:
        environment: A ClusterEnvironment that Lightning or the user chose, or None.
        elastic: The Lightning package's TorchElasticEnvironment.
    """
    if environment is None or environment.creates_processes_externally:
        return environment
    topology = Topology.from_env()
    if topology.world_size == 1:
        return environment
    os.environ.update(rank_environment(topology, os.environ))
    return elastic()
