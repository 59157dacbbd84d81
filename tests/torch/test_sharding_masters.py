"""ShardedOptimizer with float32 copies of 16-bit weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sdp_plugins.torch import ShardedOptimizer
from tests.torch.jobs import assert_same, process_group
from tests.torch.sharded_nets import assert_same_weights

STEPS = 5


def make(seed: int, dtype: torch.dtype) -> nn.Module:
    """16-bit layers, and a float32 one, as normalization often is."""
    torch.manual_seed(seed)
    layers = nn.Linear(11, 160).to(dtype), nn.Linear(160, 37).to(dtype)
    return nn.Sequential(*layers, Cast(), nn.LayerNorm(37))


class Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def backward(model: nn.Module, rank: int, step: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(8, 11, generator=random).to(dtype)).pow(3).mean().backward()


class ByHand:
    """The usual recipe: an optimizer of float32 copies, from which weights are rounded.

    Averages in one go: DDP halves gradients before it adds them, which costs float16's smallest
    ones a bit.
    """

    def __init__(self, model: nn.Module, kind: Any, **options: Any) -> None:
        self.weights = list(model.parameters())
        self.masters = [nn.Parameter(p.detach().float()) for p in self.weights]
        self.optimizer = kind(self.masters, **options)

    @torch.no_grad()
    def step(self) -> None:
        for weights, master in zip(self.weights, self.masters, strict=True):
            assert weights.grad is not None
            dist.all_reduce(weights.grad, dist.ReduceOp.AVG)
            master.grad = weights.grad.float()
        self.optimizer.step()
        for weights, master in zip(self.weights, self.masters, strict=True):
            weights.copy_(master)
            weights.grad = None


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-4}),
    (torch.optim.AdamW, {"lr": 1e-4, "fused": True}),
    (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    (torch.optim.Adafactor, {"lr": 1e-4}),
]


def like_by_hand(
    rank: int, world: int, dtype: torch.dtype, kind: Any, options: dict[str, Any]
) -> None:
    with process_group():
        plain = make(0, dtype)
        theirs = ByHand(plain, kind, **options)
        model = make(rank, dtype)
        ours = ShardedOptimizer(model, kind, master_weights=True, **options)
        for step in range(STEPS):
            backward(plain, rank, step, dtype)
            backward(model, rank, step, dtype)
            theirs.step()
            ours.step()
        assert_same_weights(model, plain)
        state = ours.state_dict()["state"]
        for index, (weights, master) in enumerate(zip(theirs.weights, theirs.masters, strict=True)):
            expected = theirs.optimizer.state[master]
            for name in expected:
                torch.testing.assert_close(state[index][name], expected[name], rtol=0, atol=0)
            if weights.dtype is dtype:
                assert_same(state[index]["master_param"], master.detach())
            assert ("master_param" in state[index]) == (weights.dtype is dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
def test_like_by_hand(
    rank_pool: Any, dtype: torch.dtype, kind: Any, options: dict[str, Any]
) -> None:
    rank_pool(2).run(like_by_hand, dtype, kind, options)


def resume(rank: int, world: int) -> None:
    """Training goes on with the copies of a checkpoint, not with rounded ones."""
    dtype = torch.bfloat16
    with process_group():
        model = make(rank, dtype)
        optimizer = ShardedOptimizer(model, torch.optim.AdamW, master_weights=True, lr=1e-4)
        for step in range(STEPS):
            backward(model, rank, step, dtype)
            optimizer.step()
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        state = optimizer.state_dict()
        dist.barrier()
        for step in range(STEPS, 2 * STEPS):
            backward(model, rank, step, dtype)
            optimizer.step()
        again = make(7, dtype)
        other = ShardedOptimizer(again, torch.optim.AdamW, master_weights=True, lr=1e-4)
        again.load_state_dict(weights)
        other.load_state_dict(state)
        dist.barrier()
        for step in range(STEPS, 2 * STEPS):
            backward(again, rank, step, dtype)
            other.step()
        assert_same_weights(again, model)
        # A plain optimizer ignores the copies, and there are none before the first step.
        plain = torch.optim.AdamW(make(0, dtype).parameters(), lr=1e-4)
        first = ShardedOptimizer(make(0, dtype), torch.optim.AdamW, master_weights=True)
        assert first.state_dict()["state"] == {}
        plain = torch.optim.AdamW(make(0, dtype).parameters(), lr=1e-4)
        plain.load_state_dict(state)
        # An optimizer without them drops them.
        last = ShardedOptimizer(make(0, dtype), torch.optim.AdamW, lr=1e-4)
        last.load_state_dict(state)
        assert all("master_param" not in values for values in last.state_dict()["state"].values())


def test_resume(rank_pool: Any) -> None:
    rank_pool(2).run(resume)


def change_weights(rank: int, world: int) -> None:
    """Weights that a script has written count, as without copies."""
    dtype = torch.bfloat16
    with process_group():
        model = make(0, dtype)
        optimizer = ShardedOptimizer(model, torch.optim.SGD, master_weights=True, lr=2.0**-12)
        backward(model, rank, 0, dtype)
        optimizer.step()
        before = optimizer.state_dict()["state"][0]["master_param"]
        with torch.no_grad():
            model[0].weight[5:9] = 3.0  # type: ignore[index]
        expected = before.clone()
        expected[5:9] = 3.0
        assert_same(optimizer.state_dict()["state"][0]["master_param"], expected)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert_same(optimizer.state_dict()["state"][0]["master_param"], expected)
        assert_same(model[0].weight.detach(), expected.to(dtype))  # type: ignore[index]


def test_changed_weights(rank_pool: Any) -> None:
    rank_pool(2).run(change_weights)


def small_updates(rank: int, world: int) -> None:
    """What the copies are for: steps of less than half a unit in the last place add up."""
    with process_group():
        moved = []
        for master_weights in False, True:
            model = nn.Linear(1, 1, bias=False).bfloat16()
            with torch.no_grad():
                model.weight.fill_(1.0)
            optimizer = ShardedOptimizer(
                model, torch.optim.SGD, master_weights=master_weights, lr=2.0**-12
            )
            for _ in range(64):
                model.weight.grad = torch.ones_like(model.weight)
                optimizer.step()
            moved.append(1.0 - model.weight.item())
        assert moved == [0.0, 2.0**-6]


def test_small_updates(rank_pool: Any) -> None:
    rank_pool(2).run(small_updates)


def scale(rank: int, world: int) -> None:
    """float16 by GradScaler, which refuses to unscale float16 gradients: the averages are not."""
    dtype = torch.float16
    with process_group():
        results = []
        for scales in False, True:
            model = make(0, dtype)
            optimizer = ShardedOptimizer(model, torch.optim.SGD, master_weights=True, lr=1e-3)
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scales)
            for step in range(STEPS):
                random = torch.Generator().manual_seed(100 * step + rank)
                loss = model(torch.randn(8, 11, generator=random).to(dtype)).pow(3).mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
            results.append(model)
        assert_same_weights(results[0], results[1], atol=1e-3, rtol=1e-2)
        with pytest.raises(AssertionError):
            assert_same_weights(results[0], make(0, dtype))


def test_grad_scaler(rank_pool: Any) -> None:
    rank_pool(2).run(scale)
