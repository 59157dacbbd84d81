"""The collectives of SMDDP 1.0 to 1.3; deprecated since 1.4."""

import warnings

from sdp_plugins.torch.smddp_v1.distributed import *  # noqa: F403

warnings.warn(
    "smdistributed.dataparallel.torch.distributed is deprecated. "
    'Hint: use torch.distributed.init_process_group("smddp").',
    DeprecationWarning,
    stacklevel=2,
)
