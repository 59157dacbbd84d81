"""A small training for tests of elastic jobs, and what must hold of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

Steps = dict[int, list[int]]
"""The samples of each step, of all ranks."""


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 10, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long(), torch.arange(samples))


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def optimizers(parameters: Iterable[Any], decay_steps: int) -> tuple[Any, Any]:
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, decay_steps, 0.7)


def same(results: Sequence[dict[str, Any]]) -> None:
    for other in results[1:]:
        for one, two in zip(results[0]["weights"], other["weights"], strict=True):
            assert (one == two).all()


def replay(steps: Steps, samples: int, decay_steps: int) -> list[Any]:
    """Train one process on the samples of each step."""
    model = net()
    optimizer, scheduler = optimizers(model.parameters(), decay_steps)
    x, y, _ = data(samples).tensors
    for number in sorted(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[steps[number]]), y[steps[number]]).backward()
        optimizer.step()
        scheduler.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


def check(
    results: Sequence[dict[str, Any]], steps: Steps, samples: int, epochs: int, decay_steps: int
) -> None:
    """The ranks are equal, and equal one process on the same samples, each once in an epoch."""
    same(results)
    expected = replay(steps, samples, decay_steps)
    for parameter, wanted in zip(results[0]["weights"], expected, strict=False):
        assert abs(parameter - wanted).max() < 1e-9
    flat = sorted(index for step in steps.values() for index in step)
    assert flat == sorted(list(range(samples)) * epochs)
