"""Collectives on tensors of an accelerator order streams and keep memory, as users of NCCL expect.

Tests wait at gates of the simulated device. A missing order gives wrong numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sdp_plugins.core import CollectiveTimeoutError
from tests import simdev
from tests.conftest import Pools
from tests.torch import models
from tests.torch.accelerator import TIERS, device_group
from tests.torch.jobs import assert_same, total, values
from tests.torch.probe import DEADLINE_S, DEVICE_POOL, PROBES, gated, on_device, streams, until
from tests.torch.stream_probes import run_probe

LIMIT = timedelta(seconds=DEADLINE_S)
CASES: dict[str, Callable[[int, int], None]] = {}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", PROBES)
def test_probe(name: str, tier: str, rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(run_probe, name, tier, 0.2)


def case(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Add a case, which runs on each rank of a group."""
    CASES[function.__name__] = function
    return function


def run_case(rank: int, world: int, name: str, tier: str) -> None:
    with device_group(tier):
        CASES[name](rank, world)


@case
def all_calls_of_a_work(rank: int, world: int) -> None:
    x = on_device(rank, 1000)
    dist.all_reduce(x)
    for call in (dist.all_reduce, lambda y, **options: dist.broadcast(y, 0, **options)):
        x = on_device(rank, 1000)
        with gated(0):
            x += 0
            work = call(x, async_op=True)
            assert not work.is_completed()
            assert not work.is_success()
            assert work.exception() is None
            future = work.get_future()
            with pytest.raises(CollectiveTimeoutError):
                work.wait(timedelta(seconds=0.01))
        assert work.wait(LIMIT)
        assert until(work.is_completed)
        assert work.is_success()
        assert [each.data_ptr() for each in work.result()] == [x.data_ptr()]
        assert [each.data_ptr() for each in future.wait()] == [x.data_ptr()]
        assert [each.data_ptr() for each in work.get_future().wait()] == [x.data_ptr()]
        work.synchronize()
        assert_same(x.cpu(), total(world, 1000) if call is dist.all_reduce else values(0, 1000))


@case
def callbacks_chain_and_call(rank: int, world: int) -> None:
    """Callbacks run in order, see results, and may issue collectives of two groups."""
    other = dist.new_group(list(range(world)))
    tensors = [on_device(rank + i, 1000) for i in range(6)]
    order: list[int] = []
    ends = []
    for i, x in enumerate(tensors):
        group = other if i % 2 else dist.group.WORLD

        def again(future: Any, i: int = i, group: Any = group) -> Tensor:
            order.append(i)
            (tensor,) = future.value()
            dist.all_reduce(tensor, group=group)
            return tensor * 1  # type: ignore[no-any-return]

        future = dist.all_reduce(x, group=group, async_op=True).get_future()
        ends.append(future.then(again).then(lambda done: done.value() + 1))
    results = [future.wait() for future in torch.futures.collect_all(ends).wait()]
    for i, result in enumerate(results):
        assert_same(result.cpu(), world * (total(world, 1000) + i * world) + 1)
    assert sorted(order) == list(range(6))
    assert [i for i in order if i % 2 == 0] == [0, 2, 4]


@case
def errors_of_callbacks_are_raised(rank: int, world: int) -> None:
    def fail(_future: Any) -> None:
        raise KeyError("of the callback")

    future = dist.all_reduce(on_device(rank, 10), async_op=True).get_future().then(fail)
    with pytest.raises((KeyError, RuntimeError), match="of the callback"):
        future.wait()
    x = on_device(rank, 10)
    dist.all_reduce(x)
    assert_same(x.cpu(), total(world, 10))


@case
def groups_and_subgroups(rank: int, world: int) -> None:
    """Each has streams of its own: one that waits holds up no other."""
    groups = [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([1, 0])]
    for group in groups:
        dist.all_reduce(torch.ones(1, device="simdev"), group=group)
    tensors = [on_device(rank + i, 1000) for i in range(6)]
    with gated(0, streams().up):
        works = [
            dist.all_reduce(x, group=groups[i % 3], async_op=True) for i, x in enumerate(tensors)
        ]
        for i in (1, 2, 4, 5):
            assert works[i].wait(LIMIT)
            assert_same(tensors[i].cpu(), total(world, 1000) + i * world)
        assert not works[0].is_completed()
    for i in (0, 3):
        works[i].wait()
        assert_same(tensors[i].cpu(), total(world, 1000) + i * world)


@case
def two_threads(rank: int, world: int) -> None:
    """By turns, in one order on all ranks, each on a stream of its own."""
    results: dict[int, list[Tensor]] = {0: [], 1: []}
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    errors: list[BaseException] = []

    def call(mine: int) -> None:
        try:
            with torch.Stream(device="simdev"):
                for i in range(10):
                    x = values(rank + i, 1000 + mine).to("simdev")
                    assert turns[mine].acquire(timeout=DEADLINE_S)
                    work = (
                        dist.broadcast(x, i % world, async_op=True)
                        if i % 3 == 2
                        else dist.all_reduce(x, async_op=True)
                    )
                    turns[1 - mine].release()
                    work.wait()
                    results[mine].append((x * 2).cpu())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(mine,)) for mine in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for mine in (0, 1):
        for i, result in enumerate(results[mine]):
            summed = total(world, 1000 + mine) + i * world
            assert_same(result, 2 * (values(i % world + i, 1000 + mine) if i % 3 == 2 else summed))


@case
def the_second_device(rank: int, world: int) -> None:
    """While the current device is the first one, and while it is the second one."""
    for current in (0, 1):
        torch.accelerator.set_device_index(current)
        for call in (dist.all_reduce, lambda y, **options: dist.broadcast(y, 0, **options)):
            x, new = torch.zeros(1000, device="simdev:1"), values(rank, 1000).to("simdev:1")
            torch.accelerator.synchronize(1)
            stream = torch.Stream(device="simdev:1")
            with stream:
                gate = simdev.gate()
                gate.block(stream)
                x += new
                work = call(x, async_op=True)
                gate.open()
            other = torch.Stream(device="simdev:1")
            with other:
                work.wait()
                seen = x * 1
                later = work.get_future().then(lambda done: done.value()[0] * 2).wait()
                expected = total(world, 1000) if call is dist.all_reduce else values(0, 1000)
                assert_same([seen.cpu(), later.cpu()], [expected, 2 * expected])
            assert torch.accelerator.current_device_index() == current
    torch.accelerator.set_device_index(0)
    x, y = on_device(rank, 100), values(rank, 100).to("simdev:1")
    for work in [dist.all_reduce(each, async_op=True) for each in (x, y)]:
        work.wait()
    assert_same([x.cpu(), y.cpu()], [total(world, 100)] * 2)


@case
def barriers_and_objects(rank: int, world: int) -> None:
    """They take no device: a stream that waits does not hold them up."""
    x = on_device(rank, 100)
    with gated(0):
        x += 0
        work = dist.all_reduce(x, async_op=True)
        dist.barrier()
        dist.barrier(async_op=True).wait()
        dist.barrier(device_ids=[0])
        objects = [{"rank": rank}, "text"] if rank == 0 else [None, None]
        dist.broadcast_object_list(objects, 0)
        assert objects == [{"rank": 0}, "text"]
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, rank)
        assert everyone == list(range(world))
    work.wait()
    assert_same(x.cpu(), total(world, 100))
    objects = [rank]
    dist.broadcast_object_list(objects, 1, device=torch.device("simdev"))
    assert objects == [1]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, tier: str, rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(run_case, name, tier)


def run_blocking(rank: int, world: int) -> None:
    """A call without async_op returns although the device has not reached it."""
    x, other = on_device(rank, 1000), torch.Stream(device="simdev")
    with device_group("flagged"):
        dist.all_reduce(on_device(rank, 10))
        with gated(0):
            before = x * 1
            dist.all_reduce(x)
            seen = x * 1
            with other:
                assert_same((x * 1).cpu(), values(rank, 1000))  # it does not wait
        assert_same([before.cpu(), seen.cpu()], [values(rank, 1000), total(world, 1000)])


def test_blocking_calls_do_not_block_with_flags(rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(run_blocking)


def train_mixed(rank: int, device: str, dtype: torch.dtype, scales: bool) -> list[Tensor]:
    """Train with autocast, every second step without synchronisation; one step overflows."""
    model = models.wrap(models.Plain, None, device, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device, enabled=scales)
    for step in range(6):
        with torch.autocast(device, dtype=dtype):
            loss = models.loss_of(model, models.batch(rank, step))
        if step % 2:
            with model.no_sync():
                scaler.scale(loss).backward()
            continue
        scaler.scale(loss * (float("inf") if step == 2 and scales and rank else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == (32768 if scales else 1)
    return [tensor.detach().cpu() for tensor in models.state(model)]


def run_mixed_precision(rank: int, world: int, name: str, scales: bool, tier: str) -> None:
    dtype = getattr(torch, name)
    with device_group(tier):
        on_cpu = train_mixed(rank, "cpu", dtype, scales)
        found = train_mixed(rank, "simdev", dtype, scales)
        assert models.agree(found)
        torch.testing.assert_close(found, on_cpu, rtol=0.01, atol=0.002)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("name", "scales"), [("float16", True), ("bfloat16", False)])
def test_mixed_precision(name: str, scales: bool, tier: str, rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(run_mixed_precision, name, scales, tier)


def run_half_gradients(rank: int, world: int, name: str, tier: str) -> None:
    """Gradients of 16 bits: reduced bit by bit as on CPUs."""
    dtype = getattr(torch, name)
    with device_group(tier):
        reduced = []
        for device in ("cpu", "simdev"):
            model = torch.nn.ParameterList([torch.zeros(n, dtype=dtype) for n in (5, 70_000)])
            model = torch.nn.Sequential(Product(model.to(device)))
            ddp = torch.nn.parallel.DistributedDataParallel(model)
            for step in range(3):
                generator = torch.Generator().manual_seed(10 * step + rank)
                factors = [torch.randn(n, generator=generator).to(dtype) for n in (5, 70_000)]
                ddp([factor.to(device) for factor in factors]).backward()
            reduced.append([p.grad.cpu() for p in ddp.parameters()])
        assert_same(reduced[1], reduced[0])


class Product(torch.nn.Module):
    """Its gradients are the inputs."""

    def __init__(self, weights: torch.nn.ParameterList) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, factors: list[Tensor]) -> Tensor:
        parts = [(w * f).sum() for w, f in zip(self.weights, factors, strict=True)]
        return torch.stack(parts).sum()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_gradients(name: str, tier: str, rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(run_half_gradients, name, tier)
