"""SMDDP 1.0 to 1.3's own API, as its scripts use it."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

from tests.ranks import Pool
from tests.torch.jobs import assert_same, values

pytestmark = pytest.mark.filterwarnings("ignore:smdistributed.dataparallel:DeprecationWarning")

ROOT = "smdistributed.dataparallel"


def module(name: str) -> Any:
    return importlib.import_module(f"{ROOT}.{name}")


def test_other_packages_can_add_to_the_namespace() -> None:
    assert importlib.import_module("smdistributed").__spec__.origin is None


def test_exceptions_holds_classes_of_errors_alone() -> None:
    """The toolkit looks for every name in what ranks have printed."""
    found = {name: getattr(module("exceptions"), name) for name in dir(module("exceptions"))}
    public = {name: value for name, value in found.items() if not name.startswith("_")}
    assert all(inspect.isclass(each) and issubclass(each, Exception) for each in public.values())
    assert issubclass(public["SMDDPTimeoutError"], public["SMDDPError"])


def test_deprecated_modules_say_what_to_use() -> None:
    with pytest.warns(DeprecationWarning, match=r'init_process_group\("smddp"\)'):
        importlib.reload(module("torch.distributed"))


def dist() -> Any:
    return module("torch.distributed")


def joined(rank: int, world: int, case: Callable[..., Any], *args: Any) -> Any:
    """Run a case after `init_process_group` as old scripts call it; it may be called again."""
    dist().init_process_group(backend="nccl", init_method="env://")
    dist().init_process_group()
    try:
        return case(*args)
    finally:
        torch_dist.destroy_process_group()


def collectives() -> None:
    d, rank, world = dist(), dist().get_rank(), dist().get_world_size()
    assert (d.is_available(), d.is_initialized(), d.get_local_rank()) == (True, True, rank)
    assert torch_dist.get_backend() == "smddp"
    ranks = [values(r, 1000) for r in range(world)]
    expected = {"SUM": sum(ranks), "MIN": ranks[0], "MAX": ranks[-1], "AVERAGE": sum(ranks) / world}
    for name, value in expected.items():
        mine = values(rank, 1000)
        assert d.all_reduce(mine, op=d.ReduceOp[name], group=d.group.WORLD) is None
        assert_same(mine, value)
    mine = torch.tensor(rank + 2)
    d.all_reduce(mine, d.ReduceOp.PRODUCT)
    assert mine == math.factorial(world + 1)
    mine = values(rank, 10)
    d.all_reduce(mine, op=None, async_op=True).wait()
    assert_same(mine, sum(values(r, 10) for r in range(world)))
    mine = values(rank, 10)
    d.reduce(mine, dst=0)
    if rank == 0:
        assert_same(mine, sum(values(r, 10) for r in range(world)))
    mine = values(rank, 10)
    d.broadcast(mine, 1)
    assert_same(mine, values(1, 10))
    all_of_them = [torch.empty(10) for _ in range(world)]
    d.all_gather(all_of_them, values(rank, 10))
    assert_same(all_of_them, [values(r, 10) for r in range(world)])
    mine = torch.empty(world)
    d.all_to_all_single(mine, torch.arange(world) + 10.0 * rank)
    assert_same(mine, 10.0 * torch.arange(world) + rank)
    d.barrier()
    with pytest.raises(ValueError, match=r"only group is group\.WORLD"):
        d.all_reduce(mine, group="half of them")


def test_collectives(rank_pool: Pool) -> None:
    rank_pool(2).run(joined, collectives)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def train(model: nn.Module, dtype: torch.dtype, accumulate: bool = False) -> list[torch.Tensor]:
    rank = torch_dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(5, 8, generator=generator).to(dtype)
        if accumulate and step % 2 == 0:
            with model.no_sync():  # type: ignore[operator]
                model(x).square().sum().backward()
            continue
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def as_torchs(accumulate: bool, dtype: torch.dtype) -> None:
    """Wrapped before it is moved, and other than rank 0's until then."""
    rank = torch_dist.get_rank()
    ours = module("torch.parallel").DistributedDataParallel(
        network(rank), device_ids=[rank], broadcast_buffers=True, gradient_accumulation_steps=2
    )
    theirs = nn.parallel.DistributedDataParallel(network(0).to(dtype))
    ours.to(dtype)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert_same(list(ours.state_dict().values()), list(theirs.state_dict().values()))
    assert_same(train(ours, dtype, accumulate), train(theirs, dtype, accumulate))
    copied = copy.deepcopy(ours)
    assert_same(train(copied, dtype), train(theirs, dtype))
    ours.to(torch.float64)
    assert all(p.dtype == torch.float64 for p in train(ours, torch.float64))
    ours.eval()
    if rank == 0:  # as the examples test: nobody else takes part
        assert ours(torch.zeros(2, 8, dtype=torch.float64)).shape == (2, 4)


def buffers() -> None:
    rank = torch_dist.get_rank()
    for wanted in (True, False):
        made = module("torch.parallel").DistributedDataParallel(
            nn.BatchNorm1d(2), broadcast_buffers=wanted
        )
        for _ in range(2):  # buffers travel before a step
            made(torch.randn(4, 2) + 100 * rank).sum().backward()
        seen = [torch.empty(2), torch.empty(2)]
        before = made.module.running_mean.clone()
        made(torch.zeros(4, 2))
        torch_dist.all_gather(seen, made.module.running_mean)
        assert torch.equal(*seen) is wanted
        assert (before.mean().item() > 5) is bool(rank)  # until then each has its own


def test_buffers_are_rank_0s_if_wanted(rank_pool: Pool) -> None:
    rank_pool(2).run(joined, buffers)


def what_torch_refuses() -> None:
    wrap = module("torch.parallel").DistributedDataParallel
    with pytest.raises(RuntimeError, match="doesn't have any parameter"):
        wrap(nn.ReLU())(torch.zeros(2))
    with pytest.raises(RuntimeError, match=r"uninitialized parameters\. Hint: "):
        wrap(nn.LazyLinear(2))


def test_modules_without_parameters_or_without_shapes(rank_pool: Pool) -> None:
    rank_pool(2).run(joined, what_torch_refuses)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_trains_as_by_torchs(
    rank_pool: Pool, accumulate: bool, dtype: torch.dtype
) -> None:
    rank_pool(2).run(joined, as_torchs, accumulate, dtype)


def wrong_arguments() -> None:
    wrap = module("torch.parallel.distributed").DistributedDataParallel
    with pytest.raises(ValueError, match="multiple of 128 bytes"):
        wrap(network(0), bucket_cap_mb=0.00001)
    with pytest.raises(TypeError, match="'delay_allreduce'"):
        wrap(network(0), delay_allreduce=True)
    with pytest.raises(ValueError, match="only group"):
        wrap(network(0), process_group="mine")


def test_wrong_arguments(rank_pool: Pool) -> None:
    with pytest.raises(RuntimeError, match=r"needs init_process_group\(\)"):
        module("torch.parallel").DistributedDataParallel(network(0))
    rank_pool(2).run(joined, wrong_arguments)
