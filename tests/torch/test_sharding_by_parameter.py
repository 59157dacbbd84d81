"""ShardedOptimizer where each parameter is updated as a whole, by one rank."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adafactor, AdamW, Muon, Optimizer

from sdp_plugins.torch import ShardedOptimizer
from sdp_plugins.torch.sharding.layout import lay_out
from tests.torch.jobs import process_group
from tests.torch.sharded_nets import (
    STEPS,
    assert_same_weights,
    loss_of,
    make,
    parameter_groups,
    plain,
    sharded,
    train,
    train_like_ddp,
)


class SignOfMean(Optimizer):
    """Known to nobody: follows the sign of a parameter's mean gradient."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    history = self.state[parameter].setdefault("history", [])
                    history.append(parameter.grad.mean())
                    parameter.sub_(group["lr"] * torch.stack(history).mean().sign())


class Decay(Optimizer):
    """Counts in a parameter group, in an attribute and beside parameters; needs no gradient."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})
        self.rate = 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["all"]["calls"] = calls = self.state["all"].get("calls", 0) + 1  # type: ignore[index]
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                parameter.mul_(1 - self.rate / (group["calls"] + calls))
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad)


CASES: list[tuple[Any, dict[str, Any]]] = [
    (Adafactor, {"lr": 0.01}),
    (Adafactor, {"lr": 0.01, "foreach": True, "weight_decay": 0.1}),
    (SignOfMean, {"lr": 0.01}),
    (Decay, {"lr": 0.01}),
]
UNKNOWN = SignOfMean, Decay


def like_ddp(rank: int, world: int, kind: Any, options: dict[str, Any]) -> None:
    train_like_ddp(rank, kind, options, by_parameter=kind in UNKNOWN)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_like_ddp(rank_pool: Any, kind: Any, options: dict[str, Any]) -> None:
    rank_pool(2).run(like_ddp, kind, options)


def take_over(rank: int, world: int) -> None:
    """An object's own step, after the update, updates nothing; its counters go on."""
    with process_group():
        ddp, theirs = plain(rank, Decay, lr=0.01)
        model = make(rank)
        given = Decay(parameter_groups(model), lr=0.01)
        sizes = [len(group["params"]) for group in given.param_groups]
        ours = ShardedOptimizer(model, given, by_parameter=True)
        train(ddp, theirs, rank)
        train(model, ours, rank)
        assert_same_weights(model, ddp)
        assert [group["calls"] for group in given.param_groups] == [STEPS] * 2
        assert [len(group["params"]) for group in given.param_groups] == sizes


def test_take_over(rank_pool: Any) -> None:
    rank_pool(2).run(take_over)


def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Matrices for Muon, and all others, as its recipes have it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [p for p in trained if p.dim() == 2], [p for p in trained if p.dim() != 2]


def train_by_both(model: nn.Module, rank: int, *optimizers: Any) -> None:
    for step in range(STEPS):
        loss_of(model, rank, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def muon(rank: int, world: int) -> None:
    """Matrices by Muon, the rest by AdamW."""
    with process_group():
        ddp = DistributedDataParallel(make(rank), broadcast_buffers=False)
        matrices, others = split(ddp)
        train_by_both(ddp, rank, Muon(matrices, lr=0.02), AdamW(others, lr=0.01))
        model = make(rank)
        matrices, others = split(model)
        by_muon = ShardedOptimizer(model, Muon, matrices, lr=0.02)
        by_adamw = ShardedOptimizer(model, AdamW, others, lr=0.01)
        train_by_both(model, rank, by_muon, by_adamw)
        assert_same_weights(model, ddp)


def test_muon(rank_pool: Any) -> None:
    rank_pool(2).run(muon)


def move_state(rank: int, world: int, kind: Any, options: dict[str, Any], to: int | None) -> None:
    """A checkpoint goes on in the plain optimizer under DDP, and the other way round."""
    by_parameter = kind in UNKNOWN
    with process_group():
        ddp, theirs = plain(rank, kind, **options)
        model, ours = sharded(rank, kind, by_parameter=by_parameter, **options)
        train(ddp, theirs, rank)
        train(model, ours, rank)
        if to is not None:
            ours.consolidate_state_dict(to)
        if to in (None, rank):
            assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]
            state, expected = ours.state_dict()["state"], theirs.state_dict()["state"]
            assert state.keys() == expected.keys()
            for index, values in state.items():
                for name, value in values.items():
                    torch.testing.assert_close(value, expected[index][name], rtol=0, atol=0)
        again, others = sharded(rank, kind, by_parameter=by_parameter, **options)
        again.load_state_dict(ddp.module.state_dict())  # type: ignore[union-attr]
        others.load_state_dict(theirs.state_dict())
        train(ddp, theirs, rank, first=7)
        train(again, others, rank, first=7)
        assert_same_weights(again, ddp)


@pytest.mark.parametrize("to", [None, 1])
@pytest.mark.parametrize(("kind", "options"), [CASES[0], *CASES[-2:]], ids=str)
def test_state(rank_pool: Any, kind: Any, options: dict[str, Any], to: int | None) -> None:
    rank_pool(2).run(move_state, kind, options, to)


def more_ranks(rank: int, world: int) -> None:
    with process_group():
        torch.manual_seed(rank)
        model = nn.Linear(7, 5)
        optimizer = ShardedOptimizer(model, Adafactor, lr=0.1)
        torch.manual_seed(0)
        alone = nn.Linear(7, 5)
        plain = Adafactor(alone.parameters(), lr=0.1)
        for _ in range(3):
            for net, each in (model, optimizer), (alone, plain):
                net(torch.ones(2, 7)).square().mean().backward()
                each.step()
                each.zero_grad()
        assert_same_weights(model, alone, rtol=1e-5, atol=1e-6)
        assert len(optimizer.state_dict()["state"]) == 2


def test_more_ranks_than_parameters(rank_pool: Any) -> None:
    rank_pool(3).run(more_ranks)


def refuse(rank: int, world: int) -> None:
    with process_group():
        model = nn.Linear(3, 3)
        with pytest.raises(TypeError, match=r"SignOfMean.*by_parameter=True"):
            ShardedOptimizer(model, SignOfMean)
        descriptors = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(ValueError, match="Muon only supports 2D"):
                ShardedOptimizer(model, Muon)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        with pytest.raises(TypeError, match="LBFGS, which treats all parameters as one"):
            ShardedOptimizer(model, torch.optim.LBFGS, by_parameter=True)


def test_refusals(rank_pool: Any) -> None:
    rank_pool(1).run(refuse)


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("bucket_bytes", [1, 1000, 10**9])
def test_layout(world: int, bucket_bytes: int) -> None:
    """Each parameter is one piece of one rank, and the ranks have about equally much."""
    parameters: list[Tensor] = [nn.Parameter(torch.zeros(n)) for n in (900, 3, 0, 500, 410, 70, 1)]
    parameters.append(nn.Parameter(torch.zeros(600, dtype=torch.bfloat16)))
    layout = lay_out(parameters, [0] * len(parameters), world, bucket_bytes, by_parameter=True)
    owned = [layout.pieces(rank) for rank in range(world)]
    pieces = [piece for mine in owned for piece in mine]
    indices = sorted(piece.slot.parameter for piece in pieces)
    assert indices == [i for i, p in enumerate(parameters) if p.numel()]
    for piece in pieces:
        assert (piece.start, piece.stop) == (piece.slot.start, piece.slot.stop)
    loads = [sum(piece.stop - piece.start for piece in mine) for mine in owned]
    assert max(loads) <= max(900, sum(loads) / world + 100)
