"""In a rank: trains one copy of a model per variant, each under stock DistributedDataParallel."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ddp_lower_bound import leave_alone
from benchmarks.ddp_variants import LOWER_BOUND, NO_COMM, REFERENCES
from benchmarks.footprint import Footprint, footprint
from benchmarks.libraries.base import Place
from benchmarks.processor_time import processor_time
from benchmarks.rank import load
from benchmarks.torch_groups import group_over, join

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
}


class Workload(Protocol):
    """A model and its data."""

    def build(self) -> torch.nn.Module:
        """Build the model, with the same weights every time; its call with a batch is the loss."""

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, ...]:
        """Return a rank's data in a step; the same for every variant."""


class Variant:
    """A model, its DDP wrapper over one group, and its optimizer."""

    def __init__(self, name: str, group: Any, workload: Workload, setting: dict[str, Any]) -> None:
        self.no_comm = name == NO_COMM
        self.workload = workload
        self.model = DistributedDataParallel(
            workload.build(),
            process_group=group,
            gradient_as_bucket_view=setting["bucket_view"],
        )
        self.lower_bound = name == LOWER_BOUND
        if self.lower_bound:
            self.model.register_comm_hook(None, leave_alone)
        self.optimizer = OPTIMIZERS[setting["optimizer"]](self.model.parameters(), lr=1e-4)
        self.done = 0

    def step(self, rank: int) -> float:
        """Run one training step; return its seconds, excluding the creation of the batch."""
        batch = self.workload.batch(self.done, rank)
        start = time.perf_counter()
        with self.model.no_sync() if self.no_comm else nullcontext():
            self.model(*batch).backward()
        if self.lower_bound:
            dist.barrier()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return time.perf_counter() - start

    def gradients(self, rank: int) -> torch.Tensor:
        """Return all gradients of a step as one vector, without changing weights."""
        self.model(*self.workload.batch(0, rank)).backward()
        # every parameter takes part in the loss, so every parameter has a gradient
        vector = torch.cat(
            [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        )
        self.optimizer.zero_grad()
        return vector


class DdpTask:
    """The commands of `ddp` and `memory` in their ranks; `scaling` adds some.

    Args:
        place: This rank's position.
        variants: References and backends.
        setting: `optimizer`, `bucket_view`, and the settings of the workload.
        workload: "module:class" of a Workload, whose argument is the setting.
    """

    def __init__(
        self,
        place: Place,
        variants: list[str],
        setting: dict[str, Any],
        workload: str = "benchmarks.bert:Workload",
    ) -> None:
        self.place = place
        join(place)
        data: Workload = load(workload)(setting)
        self.variants = {name: Variant(name, _group(name), data, setting) for name in variants}
        sizes = [p.numel() for p in self.variants[variants[0]].model.parameters()]
        self.parameters, self.gradients = sum(sizes), len(sizes)

    def describe(self) -> dict[str, Any]:
        """Return the model's size and torch's version."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "torch": torch.__version__,
        }

    def train(self, variant: str, steps: int) -> list[float]:
        """Return the seconds of each step."""
        return [self.variants[variant].step(self.place.rank) for _ in range(steps)]

    def processor_seconds(self, variant: str, steps: int) -> tuple[float, float]:
        """Return the processor time of a step: of smddp's engine, and of all else."""
        dist.barrier()
        before = processor_time()
        self.train(variant, steps)
        after = processor_time()
        return (after.engine - before.engine) / steps, (after.script - before.script) / steps

    def compare(self, one: str, other: str) -> dict[str, Any]:
        """Compare the gradients of two variants after the same steps, on the same data."""
        a, b = (self.variants[name].gradients(self.place.rank) for name in (one, other))
        return {
            "bitwise_equal": torch.equal(a, b),
            "weights_equal": self.fingerprint(one) == self.fingerprint(other),
            "largest_difference": (a - b).abs().max().item(),
            "largest_gradient": a.abs().max().item(),
        }

    def fingerprint(self, variant: str) -> str:
        """Return a hash of all weights, which must be equal on all ranks."""
        return fingerprint(self.variants[variant].model)

    def footprint(self) -> Footprint:
        """Return this process's current memory."""
        return footprint()

    def close(self) -> None:
        """Leave all groups."""
        self.variants.clear()
        dist.destroy_process_group()


def fingerprint(model: torch.nn.Module) -> str:
    """Return a hash of all weights of a model."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def _group(variant: str) -> Any:
    """Return the group of a variant: the default group is gloo's, and smddp has one of its own."""
    return None if variant in (*REFERENCES, "gloo") else group_over(variant)
