"""In a rank: trains one copy of a model per way of data parallelism."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks import bert
from benchmarks.ddp_lower_bound import leave_alone
from benchmarks.ddp_task import fingerprint
from benchmarks.footprint import Footprint, footprint
from benchmarks.fsdp_task import shard_layers
from benchmarks.libraries.base import Place
from benchmarks.torch_groups import group_over, join

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "adamw": (torch.optim.AdamW, {}),
    "fused_adamw": (torch.optim.AdamW, {"fused": True}),
    "adafactor": (torch.optim.Adafactor, {}),
    "muon": (torch.optim.Muon, {}),
}


@dataclass
class Training:
    """A model, its optimizer, and what follows a backward pass."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    synchronize: Callable[[], object] = lambda: None


def updated(model: torch.nn.Module, make: Any) -> list[torch.Tensor]:
    """The parameters that an optimizer updates: Muon, the matrices of linear layers."""
    if make is not torch.optim.Muon:
        return list(model.parameters())
    return [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]


def _ddp(
    setting: dict[str, Any], group: Any, reduce: bool = True, **options: Any
) -> DistributedDataParallel:
    model = DistributedDataParallel(bert.Workload(setting).build(), process_group=group, **options)
    if not reduce:
        model.register_comm_hook(None, leave_alone)
    return model


def none(setting: dict[str, Any], make: Any, options: dict[str, Any]) -> Training:
    """Each rank for itself."""
    model = bert.Workload(setting).build()
    return Training(model, make(updated(model, make), **options))


def lower_bound(setting: dict[str, Any], make: Any, options: dict[str, Any]) -> Training:
    """DDP fills its buckets and the ranks meet, but nothing is reduced."""
    model = _ddp(setting, None, reduce=False)
    return Training(model, make(updated(model, make), **options), dist.barrier)


def gloo(setting: dict[str, Any], make: Any, options: dict[str, Any]) -> Training:
    """DDP over gloo."""
    model = _ddp(setting, None)
    return Training(model, make(updated(model, make), **options))


def smddp(setting: dict[str, Any], make: Any, options: dict[str, Any]) -> Training:
    """DDP over smddp."""
    model = _ddp(setting, group_over("smddp"))
    return Training(model, make(updated(model, make), **options))


def direct(setting: dict[str, Any], make: Any, options: dict[str, Any]) -> Training:
    """DDP over smddp, whose buckets layers write."""
    from sdp_plugins.torch import write_into_buckets

    model = _ddp(setting, group_over("smddp"), gradient_as_bucket_view=True)
    write_into_buckets(model)
    return Training(model, make(updated(model, make), **options))


def zero(setting: dict[str, Any], make: Any, options: dict[str, Any]) -> Training:
    """DDP over smddp with torch's ZeroRedundancyOptimizer."""
    group = group_over("smddp")
    model = _ddp(setting, group)
    sharded = ZeroRedundancyOptimizer(updated(model, make), make, process_group=group, **options)
    return Training(model, sharded)


def fsdp2(setting: dict[str, Any], make: Any, options: dict[str, Any]) -> Training:
    """FSDP2 over smddp."""
    model = shard_layers(bert.Workload(setting), group_over("smddp"))
    return Training(model, make(updated(model, make), **options))


def sharded(setting: dict[str, Any], make: Any, options: dict[str, Any]) -> Training:
    """`ShardedOptimizer` over smddp."""
    from sdp_plugins.torch import ShardedOptimizer

    group, model = group_over("smddp"), bert.Workload(setting).build()
    optimizer = make(updated(model, make), **options)
    return Training(model, ShardedOptimizer(model, optimizer, group=group))


VARIANTS = {f.__name__: f for f in (none, lower_bound, gloo, smddp, direct, zero, fsdp2, sharded)}


class StepTask:
    """The commands of `step` in its ranks.

    Args:
        place: This rank's position.
        variants: Names in `VARIANTS`; each is built by its first training.
        setting: `optimizer`, and the settings of the workload.
    """

    def __init__(self, place: Place, variants: list[str], setting: dict[str, Any]) -> None:
        self.place, self.setting = place, setting
        join(place)
        self.workload = bert.Workload(setting)
        self.trained: dict[str, Training] = {}
        self.done = dict.fromkeys(variants, 0)

    def train(self, variant: str, steps: int) -> list[float]:
        """Return the seconds of each step, excluding the creation of the batch."""
        if variant not in self.trained:
            make, options = OPTIMIZERS[self.setting["optimizer"]]
            build = VARIANTS[variant]
            self.trained[variant] = build(self.setting, make, {"lr": 1e-4, **options})
        return [self._step(variant) for _ in range(steps)]

    def _step(self, variant: str) -> float:
        training = self.trained[variant]
        batch = self.workload.batch(self.done[variant], self.place.rank)
        self.done[variant] += 1
        start = time.perf_counter()
        training.model(*batch).backward()
        training.synchronize()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return time.perf_counter() - start

    def model_nbytes(self, variant: str) -> int:
        """Return the size of all weights, and so of their gradients."""
        return sum(p.nbytes for p in self.trained[variant].model.parameters())

    def fingerprint(self, variant: str) -> str:
        """Return a hash of all weights."""
        return fingerprint(self.trained[variant].model)

    def footprint(self) -> Footprint:
        """Return this process's current memory."""
        return footprint()

    def close(self) -> None:
        """Leave all groups."""
        self.trained.clear()
        dist.destroy_process_group()
