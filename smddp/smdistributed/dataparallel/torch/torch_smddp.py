"""Registers the backend "smddp" with torch.distributed, as this import does since SMDDP 1.4.

Installing this package already registers the backend. In ranks that mpirun started without
`smddprun`, this module also sets torchrun's variables, which torch's env:// reads.
"""

from sdp_plugins.torch import ProcessGroup
from sdp_plugins.torch.mpi_environment import set_torchs_variables

__all__ = ["ProcessGroup"]

set_torchs_variables()
