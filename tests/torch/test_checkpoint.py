"""torch.distributed.checkpoint: what some ranks save, others load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from tests.ranks import HANG_S, run_ranks
from tests.torch.jobs import assert_same, process_group
from tests.torch.sharded import batch, blocks, loss_of, train


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(blocks())
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def output(model: nn.Module) -> Tensor:
    result: Tensor = model(batch(0, 99)).detach()
    return result


def save(rank: int, world: int, folder: str, background: bool) -> Tensor:
    with process_group():
        model, optimizer = sharded()
        train(model, [rank], optimizer)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        if background:
            second = dist.new_group(backend="smddp")
            dcp.async_save(state, checkpoint_id=folder, process_group=second).result(timeout=HANG_S)
        else:
            dcp.save(state, checkpoint_id=folder)
        return output(model)


def load(rank: int, world: int, folder: str) -> tuple[Tensor, float]:
    with process_group():
        model, optimizer = sharded()
        loss_of(model, [rank], 0).backward()  # so that the optimizer has a state to fill
        optimizer.step()
        optimizer.zero_grad()
        states = get_state_dict(model, optimizer)
        state = dict(zip(("model", "optimizer"), states, strict=True))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        steps = {float(optimizer.state[p]["step"]) for p in model.parameters()}
        return output(model), steps.pop()


@pytest.mark.parametrize("background", [False, True])
def test_three_ranks_save_and_two_load(tmp_path: Path, background: bool) -> None:
    saved = run_ranks(3, save, str(tmp_path), background)
    for found, steps in run_ranks(2, load, str(tmp_path)):
        assert_same(found, saved[0])
        assert steps == 4


def save_and_fail(rank: int, world: int, folder: str) -> None:
    """An error on one rank is every rank's."""
    with process_group():
        with pytest.raises(dcp.api.CheckpointException, match="ranks:dict_keys"):
            dcp.save({f"state {rank}": Unpicklable() if rank else 1}, checkpoint_id=folder)
        dist.barrier()


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("not to be saved")


def test_an_error_is_told_on_all_ranks(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(save_and_fail, str(tmp_path))


def gather_sharded(rank: int, world: int) -> Tensor | None:
    """torch puts what it gathers on a device that the backend claims."""
    with process_group():
        spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(world)])
        tensor = sharded_tensor.full(spec, (4, 2), float(rank))
        whole = torch.empty(4, 2) if rank == 0 else None
        tensor.gather(dst=0, out=whole)
        return whole


def test_sharded_tensors_are_gathered(rank_pool: Any) -> None:
    whole, nothing = rank_pool(2).run(gather_sharded)
    assert nothing is None
    assert_same(whole, torch.tensor([[0.0] * 2, [0.0] * 2, [1.0] * 2, [1.0] * 2]))
