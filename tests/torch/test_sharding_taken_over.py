"""ShardedOptimizer from a plain optimizer, as the frameworks make them."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sdp_plugins.torch import ShardedOptimizer
from tests.torch.jobs import assert_same, process_group
from tests.torch.sharded_nets import (
    STEPS,
    assert_same_weights,
    loss_of,
    make,
    sharded,
    train,
)


def take_over(rank: int, world: int) -> None:
    """Its schedulers, hooks, frozen parameters and state go on to count; nothing warns."""
    with warnings.catch_warnings(), process_group():
        warnings.simplefilter("error")
        models = [make(3), make(3)]
        plains = [torch.optim.Adam(each.parameters(), lr=0.1, amsgrad=True) for each in models]
        for model, plain in zip(models, plains, strict=True):
            loss_of(model, 0, 9).backward()
            plain.step()
            plain.zero_grad()
        schedulers: list[Any] = []
        for plain in plains:
            warm = torch.optim.lr_scheduler.LinearLR(plain, 0.1, total_iters=2)
            cool = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
            schedulers.append(torch.optim.lr_scheduler.SequentialLR(plain, [warm, cool], [2]))
        steps: list[object] = []
        plains[1].register_step_post_hook(lambda *_: steps.append(1))
        ddp = DistributedDataParallel(models[0])
        ours = ShardedOptimizer(models[1], plains[1])
        assert not plains[1].state
        for step in range(STEPS):
            if step == 2:  # as after a restart
                state = ours.state_dict()
                ours.load_state_dict(state)
                plains[0].load_state_dict(plains[0].state_dict())
            for model, optimizer, scheduler in (
                (ddp, plains[0], schedulers[0]),
                (models[1], ours, schedulers[1]),
            ):
                loss_of(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            assert ours.param_groups[0]["lr"] == plains[0].param_groups[0]["lr"]
            assert_same_weights(models[1], models[0])
        assert len(steps) == STEPS
        expected, found = plains[0].state_dict(), ours.state_dict()
        assert found["param_groups"] == expected["param_groups"]
        assert found["state"].keys() == expected["state"].keys()
        models[1].frozen.requires_grad_()  # type: ignore[union-attr, operator]
        loss_of(models[1], rank, 0).backward()
        with pytest.raises(RuntimeError, match="frozen required no gradient when"):
            ours.step()
        with pytest.raises(TypeError, match="from the Adam that it is given"):
            ShardedOptimizer(models[1], plains[0], lr=0.1)
        with pytest.raises(ValueError, match="no parameter requires a gradient"):
            ShardedOptimizer(nn.Linear(3, 3).requires_grad_(False), torch.optim.SGD)


def test_a_plain_optimizer_is_taken_over(rank_pool: Any) -> None:
    rank_pool(2).run(take_over)


def consolidate(rank: int, world: int) -> None:
    """One rank has the state, until the next step."""
    with process_group():
        model, optimizer = sharded(rank, torch.optim.Adam, lr=0.1)
        train(model, optimizer, rank)
        everywhere = optimizer.state_dict()
        optimizer.consolidate_state_dict(1)
        if rank == 1:
            alone = optimizer.state_dict()
            assert alone["param_groups"] == everywhere["param_groups"]
            for index, state in everywhere["state"].items():
                for name, value in state.items():
                    assert_same(alone["state"][index][name], value)
        else:
            with pytest.raises(RuntimeError, match="consolidated on rank 1"):
                optimizer.state_dict()
        dist.barrier()
        loss_of(model, rank, 7).backward()
        optimizer.step()
        assert optimizer.state_dict()["state"].keys() == everywhere["state"].keys()


def test_one_rank_gathers_the_state(rank_pool: Any) -> None:
    rank_pool(2).run(consolidate)


def save_a_layer(rank: int, world: int, path: str) -> None:
    """Each weight is a storage of its own: files hold what is saved, and tell tensors apart."""
    with process_group():
        model = nn.Sequential(nn.Linear(9, 9), nn.Linear(900, 900))
        ShardedOptimizer(model, torch.optim.SGD)
        file = io.BytesIO()
        torch.save(model[0].state_dict(), file)
        assert len(file.getvalue()) < 10_000
        save_file(model.state_dict(), f"{path}.{rank}")


def test_weights_are_saved_apart(rank_pool: Any, tmp_path: Any) -> None:
    rank_pool(2).run(save_a_layer, str(tmp_path / "weights"))
