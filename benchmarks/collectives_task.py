"""In a rank: times collectives of torch.distributed over several backends in one job."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from benchmarks.c10d_calls import Call, make
from benchmarks.libraries.base import Place
from benchmarks.torch_groups import group_over, join
from sdp_plugins.doctor.timing import timed

WARM_UP = 2


class CollectivesTask:
    """The commands of `collectives` in its ranks.

    Args:
        place: This rank's position.
        backends: The backends; the task creates a group over each.
    """

    def __init__(self, place: Place, backends: list[str]) -> None:
        join(place)
        self.groups: dict[str, Any] = {name: group_over(name) for name in backends}
        self.calls: dict[str, Call] = {}

    def prepare(self, operation: str, nbytes: int) -> None:
        """Allocate tensors for every backend."""
        self.calls = {name: make(operation, group, nbytes) for name, group in self.groups.items()}

    def burst(self, backend: str, iterations: int) -> list[int]:
        """Return the nanoseconds of each of `iterations` back-to-back calls."""
        call = self.calls[backend]
        for _ in range(WARM_UP):
            call()
        return timed(call, iterations)

    def close(self) -> None:
        """Leave all groups."""
        self.calls.clear()
        dist.destroy_process_group()
