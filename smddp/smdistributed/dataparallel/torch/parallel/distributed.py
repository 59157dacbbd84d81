"""DistributedDataParallel of SMDDP 1.0 to 1.3; deprecated since 1.4."""

import warnings

from sdp_plugins.torch.smddp_v1.parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]

warnings.warn(
    "smdistributed.dataparallel.torch.parallel is deprecated. "
    'Hint: use torch.nn.parallel.DistributedDataParallel with the backend "smddp".',
    DeprecationWarning,
    stacklevel=2,
)
