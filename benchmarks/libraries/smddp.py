"""smddp through torch.distributed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from benchmarks.libraries.c10d import TorchBackend
from sdp_plugins.torch import share  # the import registers the backend, installed or not


class Smddp(TorchBackend):
    """A tensor that is moved into shared memory, as DDP's buckets are.

    With SDP_REGISTER=0 in the rank's environment it stays where it is.
    """

    backend = "smddp"

    def allocate(self, count: int, dtype: str) -> None:
        """A tensor that peers can map."""
        super().allocate(count, dtype)
        share(self.tensor)

    def path(self) -> str:
        """What the core says."""
        group: Any = dist.group.WORLD
        return str(group._group.last_path)
