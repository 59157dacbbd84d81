"""In a rank: the groups of torch.distributed that a benchmark compares, in one process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.libraries.base import Place

LIMIT = timedelta(seconds=300)


def join(place: Place) -> None:
    """Make the default group, gloo's, and compute with as many threads as the rank may."""
    torch.set_num_threads(place.threads)
    # A file store has no port to race for.
    where = f"file://{place.meeting_file}"
    dist.init_process_group(
        "gloo", init_method=where, rank=place.rank, world_size=place.ranks, timeout=LIMIT
    )


def group_over(backend: str) -> Any:
    """One more group of all ranks."""
    import sdp_plugins.torch  # noqa: F401  registers smddp, installed or not

    return dist.new_group(backend=backend, timeout=LIMIT)
