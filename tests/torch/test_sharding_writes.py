"""ShardedOptimizer: what programs write into the weights, of which a node has one copy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sdp_plugins.core import SdpError, _native
from sdp_plugins.torch import ShardedOptimizer
from tests.torch.jobs import assert_same, process_group
from tests.torch.sharded_nets import (
    STEPS,
    Switched,
    assert_same_weights,
    loss_of,
    plain,
    sharded,
)


@torch.no_grad()
def shrink(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.5)


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: v + 0.01 for name, v in model.state_dict().items()})


def load_one(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("large.bias"):
            parameter.data[100:200] = 0.3


def train(model: nn.Module, optimizer: Any, rank: int, write: Callable[[Any], None]) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, rank, step)
        loss.backward()
        if step == 1:
            write(model)  # a gradient is of the weights before
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            write(model)
            losses.append(float(loss_of(model, rank, 0)))
        losses.append(float(loss))
    return losses


def write_like_ddp(rank: int, world: int, write: Callable[[Any], None]) -> None:
    with process_group():
        ddp, theirs = plain(rank, torch.optim.AdamW, lr=0.01)
        model, ours = sharded(rank, torch.optim.AdamW, lr=0.01)
        assert train(model, ours, rank, write) == train(ddp, theirs, rank, write)
        assert_same_weights(model, ddp)


@pytest.mark.parametrize("write", [shrink, clamp, load, load_one])
def test_writes_on_all_ranks(rank_pool: Any, write: Callable[[Any], None]) -> None:
    rank_pool(2).run(write_like_ddp, write)


def swap(rank: int, world: int) -> None:
    """Weights that are swapped out and back, as for an evaluation with averages."""
    with process_group():
        model, optimizer = sharded(rank, torch.optim.SGD, lr=0.1)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.zero_()
        dist.barrier()
        assert_same(next(model.parameters()), torch.zeros_like(before[0]))
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.data.copy_(value)
        assert not optimizer._weights.changed()
        assert optimizer._weights._written
        loss_of(model, rank, 0).backward()
        optimizer.step()
        assert not optimizer._weights._written and not optimizer._weights.changed()


def test_weights_are_swapped_and_back(rank_pool: Any) -> None:
    rank_pool(2).run(swap)


def write_alone(rank: int, world: int) -> None:
    with process_group():
        model, optimizer = sharded(rank, torch.optim.SGD, lr=0.1)
        before = model.second.weight.detach().clone()  # type: ignore[operator,union-attr]
        if rank == 1:
            with torch.no_grad():
                model.second.weight[3, 5] = 42  # type: ignore[index,operator,union-attr]
                model.first.weight.copy_(model.first.weight.clone())  # type: ignore[operator,union-attr]
        else:
            assert_same(model.second.weight, before)
        for step in range(2):  # again until the ranks agree
            loss_of(model, rank, step).backward()
            with pytest.raises(RuntimeError, match=r"have changed second\.weight to different"):
                optimizer.step()
            optimizer.zero_grad()
        if rank == 1:
            model.second.weight.data.copy_(before)  # type: ignore[operator,union-attr]
        loss_of(model, rank, 2).backward()
        optimizer.step()


def test_a_write_on_one_rank_is_told(rank_pool: Any) -> None:
    rank_pool(2).run(write_alone)


def write_differently(rank: int, world: int) -> None:
    with process_group():
        model, optimizer = sharded(rank, torch.optim.SGD, lr=0.1)
        model.second.weight.data[3, 5] = rank  # type: ignore[index,operator,union-attr]
        model.first.weight.data[3] = 7.0  # type: ignore[index,operator,union-attr]
        loss_of(model, rank, 0).backward()
        with pytest.raises(RuntimeError, match=r"have changed second\.weight to different"):
            optimizer.step()


def test_different_writes_are_told(rank_pool: Any) -> None:
    rank_pool(2).run(write_differently)


def columns(rank: int, world: int) -> None:
    """One page in two is written, in the memory of many parameters."""
    with process_group():
        layers = [nn.Linear(9, 9) for _ in range(150)]
        model = nn.Sequential(nn.Embedding(4000, 2048), nn.Linear(2048, 9), *layers)
        optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        model(torch.tensor([rank])).sum().backward()
        model[0].weight.data[:, 0] = 0.5  # type: ignore[index]
        written = _native.written_pages(
            optimizer._weights._view.data_ptr(), optimizer._weights._view.nbytes
        )
        assert len(written) > 1000
        optimizer._weights.changed()
        assert len(optimizer._weights._written) == 1
        optimizer.step()
        assert (model[0].weight[world:, 0] == 0.5).all()  # type: ignore[index]


def test_many_small_writes(rank_pool: Any) -> None:
    rank_pool(2).run(columns)


def stale(rank: int, world: int) -> None:
    """A backward pass through weights of before an update."""
    with process_group():
        model, optimizer = sharded(rank, torch.optim.SGD, lr=0.1)
        before = loss_of(model, rank, 0)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()
        model = Switched()
        optimizer = ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        x = torch.ones(2, 9, requires_grad=True)
        before = model(x, (3, 4)).sum()
        model(x, (0, 1)).sum().backward()
        optimizer.step()
        before.backward()  # of weights that nobody has updated


def test_graphs_of_before_a_step(rank_pool: Any) -> None:
    rank_pool(2).run(stale)


def lock(rank: int, world: int) -> None:
    """Locked memory is copied when it is mapped, and cannot be given back."""
    libc = ctypes.CDLL(None, use_errno=True)
    with process_group():
        model, optimizer = sharded(rank, torch.optim.SGD, lr=0.1)
        if libc.mlockall(1):
            return  # this process may not lock memory
        try:
            loss_of(model, rank, 0).backward()
            with pytest.raises(SdpError, match="cannot drop what was written"):
                optimizer.step()
        finally:
            libc.munlockall()


def test_locked_memory_is_told(rank_pool: Any) -> None:
    rank_pool(2).run(lock)


def outlive(rank: int, world: int) -> None:
    with process_group():
        model, optimizer = sharded(rank, torch.optim.SGD, lr=0.1)
        loss_of(model, rank, 0).backward()
        optimizer.step()
        after = [parameter.detach().clone() for parameter in model.parameters()]
    del optimizer
    for parameter, value in zip(model.parameters(), after, strict=True):
        assert_same(parameter, value)
        parameter.data.add_(rank)
    assert loss_of(model, rank, 0) > 0


def test_weights_outlive_the_group(rank_pool: Any) -> None:
    rank_pool(2).run(outlive)
