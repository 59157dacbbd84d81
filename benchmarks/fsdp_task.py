"""In a rank: trains one copy of a model per backend, each sharded by FSDP2."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from benchmarks import bert
from benchmarks.ddp_task import OPTIMIZERS
from benchmarks.libraries.base import Place
from benchmarks.torch_groups import group_over, join


def shard_layers(workload: bert.Workload, group: Any) -> bert.Bert:
    """Build a model whose layers are sharded over a group."""
    model, mesh = workload.build(), DeviceMesh.from_group(group, "cpu")
    for layer in model.encoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Sharded:
    """A model whose layers are sharded over one group, and its optimizer."""

    def __init__(self, group: Any, workload: bert.Workload, optimizer: str) -> None:
        self.workload = workload
        self.model = shard_layers(workload, group)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters(), lr=1e-4)
        self.done = 0

    def step(self, rank: int) -> float:
        """Run one training step; return its seconds, excluding the creation of the batch."""
        batch = self.workload.batch(self.done, rank)
        start = time.perf_counter()
        self.model(*batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return time.perf_counter() - start

    def shards(self) -> torch.Tensor:
        """Return this rank's part of all weights, as one vector."""
        tensors: Any = self.model.parameters()
        return torch.cat([tensor.to_local().detach().flatten() for tensor in tensors])


class FsdpTask:
    """The commands of `fsdp` in its ranks.

    Args:
        place: This rank's position.
        variants: The backends.
        setting: `rows`, `tokens`, `optimizer` and `model`.
    """

    def __init__(self, place: Place, variants: list[str], setting: dict[str, Any]) -> None:
        self.place = place
        join(place)
        workload, optimizer = bert.Workload(setting), setting["optimizer"]
        self.models = {name: Sharded(group_over(name), workload, optimizer) for name in variants}

    def parameters(self) -> int:
        """Return the number of parameters of the whole model."""
        return sum(p.numel() for p in next(iter(self.models.values())).model.parameters())

    def train(self, variant: str, steps: int) -> list[float]:
        """Return the seconds of each step."""
        return [self.models[variant].step(self.place.rank) for _ in range(steps)]

    def difference(self, one: str, other: str) -> float:
        """Return the largest difference between two backends' weights after the same steps."""
        a, b = self.models[one].shards(), self.models[other].shards()
        return (a - b).abs().max().item()

    def close(self) -> None:
        """Leave all groups."""
        self.models.clear()
        dist.destroy_process_group()
