"""Registers the backend "smddp" with torch.distributed, as its import does in SMDDP from 1.4 on.

Where this package is installed the backend is known without it. In ranks that mpirun has started
without `smddprun` it sets torchrun's variables, for which torch's env:// looks.
"""

from sdp_plugins.torch import ProcessGroup
from sdp_plugins.torch.mpi_environment import set_torchs_variables

__all__ = ["ProcessGroup"]

set_torchs_variables()
