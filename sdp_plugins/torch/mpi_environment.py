"""torch's environment variables in ranks that mpirun or srun started."""

from __future__ import annotations

import os

from sdp_plugins.core.rank_environment import rank_environment
from sdp_plugins.core.topology import Topology


def set_torchs_variables() -> None:
    """Set RANK, WORLD_SIZE, MASTER_ADDR and so on from the launcher's own variables.

    Variables that are already set keep their values. A process without a launcher is left as it is.
    On several nodes the user has to pass MASTER_ADDR (`mpirun -x MASTER_ADDR=...`), because mpirun
    does not provide it.
    """
    topology = Topology.from_env()
    if topology.source != "single" and "RANK" not in os.environ:
        os.environ.update(rank_environment(topology, os.environ))
