"""torch's variables in ranks that mpirun or srun has started."""

from __future__ import annotations

import os

from sdp_plugins.core.rank_environment import rank_environment
from sdp_plugins.core.topology import Topology


def set_torchs_variables() -> None:
    """Set RANK, WORLD_SIZE, MASTER_ADDR and so on, where a launcher has only set its own.

    What is set already stays. A process that no launcher has started is left as it is. On several
    nodes MASTER_ADDR has to be given (`mpirun -x MASTER_ADDR=...`): mpirun does not tell it.
    """
    topology = Topology.from_env()
    if topology.source != "single" and "RANK" not in os.environ:
        os.environ.update(rank_environment(topology, os.environ))
