"""What is trained: a small network on random data, of which each rank takes 32 samples a step."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

BATCH = 32
FOREVER = 10**9


def samples() -> TensorDataset:
    """Return as many samples as the digits have."""
    torch.manual_seed(1)
    return TensorDataset(torch.rand(1797, 64), torch.randint(10, (1797,)))


def network() -> nn.Module:
    """Return a network of 0.3 million parameters."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
