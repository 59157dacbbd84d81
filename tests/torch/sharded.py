"""Models, data and training loops of the tests of sharded training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 4
FEATURES = 24


class Block(nn.Module):
    """What large models are made of: a normalised residual branch of two layers."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up = nn.Linear(features, 2 * features)
        self.down = nn.Linear(2 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + branch


def blocks(n: int = 3) -> nn.Sequential:
    """The same on all ranks."""
    torch.manual_seed(3)
    return nn.Sequential(*(Block() for _ in range(n)))


def batch(rank: int, step: int) -> Tensor:
    """A rank's rows of a step."""
    return torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: Callable[[Tensor], Tensor], ranks: Sequence[int], step: int) -> Tensor:
    """The mean over these ranks' rows."""
    rows = torch.cat([batch(rank, step) for rank in ranks])
    return model(rows).square().mean()


def train(model: nn.Module, ranks: Sequence[int], optimizer: Any = None) -> None:
    """Some steps on these ranks' rows."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, ranks, step).backward()
        optimizer.step()


def trained_alone(world: int) -> dict[str, Tensor]:
    """What one process makes of all ranks' rows."""
    model = blocks()
    train(model, range(world))
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal but for the order in which sums are made."""
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
