"""smddp through torch.distributed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from benchmarks.libraries.c10d import TorchBackend
from sdp_plugins.torch import share  # registers the backend, even in a clone


class Smddp(TorchBackend):
    """Reduces a tensor that is moved into shared memory, as DDP's buckets are.

    With SDP_REGISTER=0 in the rank's environment the tensor stays in private memory.
    """

    backend = "smddp"

    def allocate(self, count: int, dtype: str) -> None:
        """Allocate a tensor that peers can map."""
        super().allocate(count, dtype)
        share(self.tensor)

    def path(self) -> str:
        """Return the path that the core reports."""
        group: Any = dist.group.WORLD
        return str(group._group.last_path)
