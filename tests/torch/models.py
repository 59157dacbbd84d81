"""Models and training loops of the DDP tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 5
FEATURES = 640  # 640 x 640 float32 are 1.6 MiB: buckets that move into shared memory


class Plain(nn.Sequential):
    """Three layers, of which the second alone fills a bucket."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(30, FEATURES),
            nn.ReLU(),
            nn.Linear(FEATURES, FEATURES),
            nn.Linear(FEATURES, 3),
        )


class Normalised(nn.Sequential):
    """With buffers that differ between ranks unless they are broadcast."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(30, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 3))


class Branching(nn.Module):
    """Uses one of two branches, so that the other's parameters get no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.stem = nn.Linear(30, FEATURES)
        self.branches = nn.ModuleList([nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 3)])

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.branches[self.calls % 2](self.stem(x).relu())
        return result


class Mixed(nn.Module):
    """Parameters of three dtypes, which never share a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(30, 40)
        self.second = nn.Linear(40, 40).double()
        self.third = nn.Linear(40, 3).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).double()).relu()
        return self.third(y.to(torch.bfloat16)).float()


def batch(rank: int, step: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """A rank's data in one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(size, 30, generator=generator)
    return inputs, torch.randn(size, 3, generator=generator)


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    device = next(model.parameters()).device
    inputs, targets = (tensor.to(device) for tensor in data)
    return nn.functional.mse_loss(model(inputs), targets)


def make(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(17)
    return kind()


def train(model: nn.Module, rank: int, steps: int = STEPS) -> None:
    """The usual loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()


def train_accumulating(model: Any, rank: int) -> None:
    """Two backward passes for each step; only the second one synchronises."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, batch(rank, 100 + step)).backward()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()


def train_joining(model: Any, rank: int, **options: Any) -> None:
    """Ranks have different numbers of batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join(**options):
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()


def wrap(
    kind: Callable[[], nn.Module], group: Any, device: str = "cpu", **options: Any
) -> DistributedDataParallel:
    model = make(kind).to(device)
    if "delay" in options:
        names = options.pop("delay")
        named = [(n, p) for n, p in model.named_parameters() if n in names]
        options.update(delay_all_reduce_named_params=named, param_to_hook_all_reduce=None)
        options["param_to_hook_all_reduce"] = next(
            p for n, p in model.named_parameters() if n not in names
        )
    return DistributedDataParallel(model, process_group=group, **options)


def state(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def agree(tensors: list[Tensor], group: Any = None) -> bool:
    """Whether all ranks hold the same bits."""
    same = torch.ones((), dtype=torch.int64)
    for tensor in tensors:
        mine = tensor.detach().reshape(-1).view(torch.uint8)
        root = mine.clone()
        dist.broadcast(root, 0, group=group)
        same *= torch.equal(mine, root)
    dist.all_reduce(same, dist.ReduceOp.MIN, group=group)
    return bool(same)
