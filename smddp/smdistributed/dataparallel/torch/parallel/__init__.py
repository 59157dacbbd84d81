"""DistributedDataParallel of SMDDP 1.0 to 1.3."""

from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
