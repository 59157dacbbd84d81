"""Models and optimizers for the tests of ShardedOptimizer: under DDP, and sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sdp_plugins.torch import ShardedOptimizer
from tests.torch.jobs import assert_same, process_group

STEPS = 4


class Net(nn.Module):
    """Weights in channels_last, tied, frozen, large, of sizes that fit no alignment; buffers."""

    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Conv2d(3, 5, 3)
        self.convolution = convolution.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(5)
        large = nn.Conv2d(5, 401, 3)
        self.large = large.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.first = nn.Linear(401 * 2 * 2, 37)
        self.second = nn.Linear(37, 37, bias=False)
        self.third = nn.Linear(37, 37)
        self.third.weight = self.second.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.large(torch.relu(self.norm(self.convolution(x)))).flatten(1)
        hidden = self.third(torch.tanh(self.second(self.first(hidden))))
        return hidden * self.frozen.mean()


def make(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    random = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(8, 3, 6, 6, generator=random)).square().mean()


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """No weight decay of vectors, as in most recipes."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.02},
    ]


def plain(rank: int, kind: Any, **options: Any) -> tuple[nn.Module, Any]:
    model = DistributedDataParallel(make(rank), broadcast_buffers=False)
    return model, kind(parameter_groups(model), **options)


def sharded(rank: int, kind: Any, **options: Any) -> tuple[nn.Module, ShardedOptimizer]:
    model = make(rank)
    groups = parameter_groups(model)
    return model, ShardedOptimizer(model, kind, groups, bucket_bytes=8_000, **options)


def train(
    model: nn.Module,
    optimizer: Any,
    rank: int,
    first: int = 0,
    clip: Callable[[], Any] = lambda: None,
) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(first, first + STEPS):
        loss_of(model, rank, step).backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def train_like_ddp(rank: int, kind: Any, options: dict[str, Any], **how: Any) -> None:
    """Train under DDP and sharded (`how`: divided), and compare the weights, bit by bit."""
    with process_group():
        ddp, theirs = plain(rank, kind, **options)
        model, ours = sharded(rank, kind, **how, **options)
        train(ddp, theirs, rank)
        train(model, ours, rank)
        assert_same_weights(model, ddp)


CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def assert_same_weights(model: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    for found, other in zip(model.parameters(), expected.parameters(), strict=True):
        if tolerance:
            torch.testing.assert_close(found, other, **tolerance)
        else:
            assert_same(found, other)


class Switched(nn.Module):
    """Layers of which a step may use some, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(5))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        for index in used:
            x = torch.tanh(self.layers[index](x))
        return x
