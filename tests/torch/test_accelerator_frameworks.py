"""Frameworks over device tensors: on the simulated accelerator they do what they do on CPUs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests import simdev
from tests.conftest import Pools
from tests.torch.accelerator import TIERS, device_group
from tests.torch.jobs import assert_same, values
from tests.torch.probe import DEVICE_POOL
from tests.torch.sharded import FEATURES, Block, batch, blocks

STEPS = 3
WORLD = 2


def loss_of(model: Any, rank: int, step: int, device: str) -> Tensor:
    result: Tensor = model(batch(rank, step).to(device)).square().mean()
    return result


def train(model: Any, rank: int, device: str, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, rank, step, device).backward()
        optimizer.step()


def layers() -> nn.Sequential:
    """Without LayerNorm, which computes on the simulated device in two types only as GPUs do."""
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(3)))


def shard(device: str, kind: Callable[[], nn.Sequential] = blocks, **options: Any) -> Any:
    mesh = init_device_mesh(device, (WORLD,))
    model = kind().to(device)
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(model: nn.Module) -> list[Tensor]:
    return [each.full_tensor() for each in model.state_dict().values()]


# ---- sharded training ----------------------------------------------------------------------------


def fsdp2(rank: int, device: str) -> list[Tensor]:
    model = shard(device)
    train(model, rank, device)
    return whole(model)


def fsdp2_mixed_accumulating_clipping(rank: int, device: str) -> list[Tensor]:
    model = shard(device, layers, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    norms = []
    for step in range(STEPS):
        for accumulated in range(2):
            model.set_requires_gradient_sync(accumulated == 1)
            loss_of(model, rank, 2 * step + accumulated, device).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    return [*whole(model), *norms]


def fsdp2_offloaded(rank: int, device: str) -> list[Tensor]:
    model = shard(device, offload_policy=CPUOffloadPolicy(pin_memory=device != "cpu"))
    model = model.to("cpu")
    train(model, rank, device)
    return [each.to(device).full_tensor() for each in model.state_dict().values()]


def fsdp1(rank: int, device: str) -> list[Tensor]:
    found = []
    kinds = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
    for kind, mixed in product(kinds, (None, MixedPrecision(reduce_dtype=torch.float64))):
        model = FullyShardedDataParallel(
            blocks().to(device),
            sharding_strategy=kind,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu") if device == "cpu" else None,
            mixed_precision=mixed,
            use_orig_params=True,
        )
        train(model, rank, device)
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            found += [parameter.detach().clone() for parameter in model.parameters()]
    return found


def zero(rank: int, device: str) -> list[Tensor]:
    found = []
    for views in (False, True):
        model = DistributedDataParallel(blocks().to(device))
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=views
        )
        train(model, rank, device, optimizer)
        optimizer.consolidate_state_dict(to=0)
        found += [each.detach() for each in model.parameters()]
    return found


def join(rank: int, device: str) -> list[Tensor]:
    model = DistributedDataParallel(blocks().to(device))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    with Join([model, optimizer]):
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            loss_of(model, rank, step, device).backward()
            optimizer.step()
    return [each.detach() for each in model.parameters()]


def local_sgd(rank: int, device: str) -> list[Tensor]:
    model = DistributedDataParallel(blocks().to(device))
    alone, _ = dist.new_subgroups(group_size=1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=1)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(2, warmup_steps=1)
    )
    train(model, rank, device, optimizer)
    return [each.detach() for each in model.parameters()]


def checkpoint(rank: int, device: str) -> list[Tensor]:
    model, again = shard(device), shard(device)
    train(model, rank, device)
    folder = [tempfile.mkdtemp()] if rank == 0 else [""]
    dist.broadcast_object_list(folder, 0)
    for name, save in (("now", dcp.save), ("later", dcp.async_save)):
        path = str(Path(folder[0]) / name)
        saving = save({"model": get_model_state_dict(model)}, checkpoint_id=path)
        if name == "later":
            saving.result()
        state = {"model": get_model_state_dict(again)}
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(again, state["model"])
        assert_same(whole(again), whole(model))
    return whole(again)


def compiled(rank: int, device: str) -> list[Tensor]:
    model = DistributedDataParallel(blocks(1).to(device))
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(2):
        loss_of(compiled, rank, step, device).backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


# ---- DTensor, and functional collectives ---------------------------------------------------------


def dtensor(rank: int, device: str) -> list[Tensor]:
    mesh = init_device_mesh(device, (WORLD,))
    matrix = torch.arange(14.0).reshape(2, 7).to(device)
    places, found = [Replicate(), Shard(0), Shard(1)], []
    for source, target in product(places, places):
        moved = distribute_tensor(matrix, mesh, [source]).redistribute(mesh, [target])
        found.append(moved.full_tensor())
    for target in places:
        part = DTensor.from_local(matrix * (rank + 1), mesh, [Partial()], run_check=False)
        found.append(part.redistribute(mesh, [target]).full_tensor())
    left = distribute_tensor(matrix, mesh, [Shard(1)])
    return [*found, (left @ left.t()).full_tensor(), left.softmax(1).full_tensor()]


def tensor_parallel(rank: int, device: str) -> list[Tensor]:
    mesh = init_device_mesh(device, (WORLD,))
    model = blocks(1)[0].to(device)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    out = model(batch(0, 0).to(device))
    out.sum().backward()
    return [out.detach(), *(each.grad.full_tensor() for each in model.up.parameters())]


def functionals(rank: int, device: str) -> list[Tensor]:
    group, mine = dist.group.WORLD, values(rank, 4).to(device)
    many, sizes = mine.repeat(WORLD), [4] * WORLD
    pairs = [(r + 1) % WORLD for r in range(WORLD)]
    return [
        functional.wait_tensor(each)
        for each in (
            functional.all_reduce(mine, "sum", group),
            functional.all_reduce(mine, "avg", group) * 2,
            functional.broadcast(mine, 1, group),
            functional.all_gather_tensor(mine.view(2, 2), 1, group),
            functional.reduce_scatter_tensor(many, "sum", 0, group),
            *functional.all_reduce_coalesced([mine, mine + 1], "sum", group),
            *functional.all_gather_into_tensor_coalesced([mine, mine * 2], group),
            *functional.reduce_scatter_tensor_coalesced([many, many + 1], "sum", [0, 0], group),
            functional.all_to_all_single(many, sizes, sizes, group),
            functional.permute_tensor(mine, pairs, group),
        )
    ]


def autograd(rank: int, device: str) -> list[Tensor]:
    group, weights = dist.group.WORLD, torch.arange(4.0 * WORLD).to(device)
    x, y, z = (values(rank, n).to(device).requires_grad_() for n in (4, 4 * WORLD, 4))
    (functional.all_gather_tensor_autograd(x, 0, group) * weights).sum().backward()
    sizes = [4] * WORLD
    (functional.all_to_all_single_autograd(y, sizes, sizes, group) * weights).sum().backward()
    (differentiable.all_reduce(z, group=group) * (rank + 1)).sum().backward()
    return [each.grad for each in (x, y, z) if each.grad is not None]


def function(x: Tensor) -> Tensor:
    summed = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
    gathered = functional.all_gather_tensor(summed + 1, 0, dist.group.WORLD)
    y = functional.reduce_scatter_tensor(gathered.sin(), "sum", 0, dist.group.WORLD) + 1
    dist.all_reduce(y)
    return y + 1


def compiled_functionals(rank: int, device: str) -> list[Tensor]:
    made = torch.compile(function, fullgraph=True, backend="aot_eager")
    return [made(values(rank + seed, 8).to(device)) for seed in range(2)]


# ---- messages, and objects -----------------------------------------------------------------------


def pipeline(rank: int, device: str) -> list[Tensor]:
    model = blocks(WORLD).to(device)
    x, target = torch.randn(2, 8, FEATURES, generator=torch.Generator().manual_seed(1)).to(device)
    stage = PipelineStage(model[rank], rank, WORLD, torch.device(device))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    schedule.step(x) if rank == 0 else schedule.step(target=target)
    return [each.grad for each in model[rank].parameters() if each.grad is not None]


def objects(rank: int, device: str) -> list[Tensor]:
    mine = {"rank": rank, "tensor": values(rank, 3).to(device)}
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, mine)
    given = [mine, rank]
    dist.broadcast_object_list(given, 1, device=torch.device(device))
    taken: list[Any] = [None]
    dist.scatter_object_list(taken, everyone if rank == 0 else None, 0)
    if rank == 0:
        dist.send_object_list([mine], 1, device=torch.device(device))
        received = [mine]
    else:
        received = [None]
        dist.recv_object_list(received, 0, device=torch.device(device))
    return [each["tensor"] for each in (*everyone, given[0], taken[0], received[0])]


def smddp_v1(rank: int, device: str) -> list[Tensor]:
    from smdistributed.dataparallel.torch.parallel import distributed

    model = distributed.DistributedDataParallel(
        blocks().to(device), device_ids=None if device == "cpu" else [0], bucket_cap_mb=1
    )
    train(model, rank, device)
    with model.no_sync():
        loss_of(model, rank, 9, device).backward()
    loss_of(model, rank, 10, device).backward()
    return [*model.state_dict().values(), *(each.grad for each in model.parameters())]


CASES: list[Callable[[int, str], list[Tensor]]] = [
    fsdp2,
    fsdp2_mixed_accumulating_clipping,
    fsdp2_offloaded,
    fsdp1,
    zero,
    join,
    local_sgd,
    checkpoint,
    compiled,
    dtensor,
    tensor_parallel,
    functionals,
    autograd,
    compiled_functionals,
    pipeline,
    objects,
    smddp_v1,
]


def run_case(rank: int, world: int, name: str, tier: str) -> None:
    with device_group(tier):
        simdev.set_poison_late(name.startswith("fsdp2") or name == "checkpoint")
        on_cpu = globals()[name](rank, "cpu")
        on_device = globals()[name](rank, "simdev")
        assert {each.device.type for each in on_device} == {"simdev"}
        assert_same([each.cpu() for each in on_device], on_cpu)


@pytest.mark.filterwarnings("ignore:smdistributed.dataparallel:DeprecationWarning")
@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
def test_like_cpus(name: str, rank_pools: Pools) -> None:
    rank_pools.pool(WORLD, DEVICE_POOL).run(run_case, name, TIERS[0])


@pytest.mark.parametrize("name", ["fsdp2", "zero", "autograd"])
def test_without_flags(name: str, rank_pools: Pools) -> None:
    rank_pools.pool(WORLD, DEVICE_POOL).run(run_case, name, TIERS[1])
