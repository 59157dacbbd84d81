"""FSDP, in its old and its new form, trains what one process trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.torch.jobs import assert_same, process_group
from tests.torch.sharded import Block, assert_close, batch, blocks, loss_of, train, trained_alone

CPU = torch.device("cpu")


# ---- FSDP2: fully_shard --------------------------------------------------------------------------


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}


MESHES = {
    "one dimension": (4,),
    "replicated shards": (2, 2),
}


def run_new(rank: int, world: int, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    with process_group():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        model = shard(blocks(), mesh=mesh, **options)
        train(model, [rank])
        assert_close(whole(model), trained_alone(world))


@pytest.mark.parametrize("reshard", [True, False, 2])
@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_fully_shard(rank_pool: Any, shape: tuple[int, ...], reshard: Any) -> None:
    if reshard == 2 and len(shape) == 2:
        reshard = True
    rank_pool(4).run(run_new, shape, {"reshard_after_forward": reshard})


def run_uneven(rank: int, world: int) -> None:
    """Three ranks share 24 and 48 rows, and biases of 5."""
    with process_group():
        torch.manual_seed(0)
        odd = nn.Sequential(nn.Linear(24, 5), nn.ReLU(), nn.Linear(5, 1))
        alone = [p.detach().clone() for p in odd.parameters()]
        model = shard(odd)
        assert_same([p.full_tensor() for p in model.parameters()], alone)
        loss_of(model, [rank], 0).backward()
        torch.manual_seed(0)
        other = nn.Sequential(nn.Linear(24, 5), nn.ReLU(), nn.Linear(5, 1))
        loss_of(other, range(world), 0).backward()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def test_shards_that_differ_in_size(rank_pool: Any) -> None:
    rank_pool(3).run(run_uneven)


def train_mixed(rank: int, backend: str) -> tuple[dict[str, Tensor], Tensor]:
    with process_group(backend):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = shard(blocks(), mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(3):
            for accumulated in range(2):
                model.set_requires_gradient_sync(accumulated == 1)
                loss_of(model, [rank], 2 * step + accumulated).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return whole(model), norm.full_tensor()


def run_mixed(rank: int, world: int) -> None:
    """The same bits as over gloo: with two ranks there is one order of summing."""
    assert_same(train_mixed(rank, "smddp"), train_mixed(rank, "gloo"))


def test_mixed_precision_accumulation_and_clipping(rank_pool: Any) -> None:
    rank_pool(2).run(run_mixed)


def run_compiled(rank: int, world: int) -> None:
    with process_group():
        model = shard(blocks(1))
        model.compile(backend="aot_eager")
        train(model, [rank])
        alone = blocks(1)
        train(alone, range(world))
        assert_close(whole(model), dict(alone.state_dict()))


def test_compiled(rank_pool: Any) -> None:
    rank_pool(2).run(run_compiled)


# ---- FSDP1: FullyShardedDataParallel -------------------------------------------------------------


def wrap(strategy: ShardingStrategy, **options: Any) -> FullyShardedDataParallel:
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(
        blocks(), sharding_strategy=strategy, auto_wrap_policy=policy, device_id=CPU, **options
    )


def run_old(rank: int, world: int, strategy: ShardingStrategy) -> None:
    with process_group():
        hybrid = strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")) if hybrid else None
        model = wrap(strategy, use_orig_params=True, device_mesh=mesh)
        train(model, [rank])
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            found = {
                name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
                for name, parameter in model.named_parameters()
            }
        assert_close(found, trained_alone(world))


STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2,
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_fully_sharded_data_parallel(rank_pool: Any, strategy: ShardingStrategy) -> None:
    rank_pool(4).run(run_old, strategy)


def run_state_dicts(rank: int, world: int) -> None:
    """Saved by ranks, loaded into a model of one process, and back."""
    with process_group():
        kind = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float64)
        model = wrap(ShardingStrategy.FULL_SHARD, mixed_precision=kind)
        train(model, [rank])
        config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            state = model.state_dict()
        alone = blocks()
        alone.load_state_dict(state)
        assert_same(alone(batch(0, 0)), model(batch(0, 0)).detach())
        again = wrap(ShardingStrategy.FULL_SHARD)
        with FullyShardedDataParallel.state_dict_type(again, StateDictType.FULL_STATE_DICT, config):
            again.load_state_dict(state)
        assert_same(again(batch(0, 0)).detach(), alone(batch(0, 0)).detach())
        dist.barrier()


def test_state_dicts(rank_pool: Any) -> None:
    rank_pool(2).run(run_state_dicts)
