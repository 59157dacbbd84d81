"""In a rank: the groups of torch.distributed that a benchmark compares, in one process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.libraries.base import Place

LIMIT = timedelta(seconds=300)


def join(place: Place) -> None:
    """Create the default group, over gloo, and set the rank's number of compute threads."""
    torch.set_num_threads(place.threads)
    # A file store needs no port, so no race for one.
    where = f"file://{place.meeting_file}"
    dist.init_process_group(
        "gloo", init_method=where, rank=place.rank, world_size=place.ranks, timeout=LIMIT
    )


def group_over(backend: str) -> Any:
    """Create another group of all ranks."""
    import sdp_plugins.torch  # noqa: F401  registers smddp, installed or not

    return dist.new_group(backend=backend, timeout=LIMIT)
