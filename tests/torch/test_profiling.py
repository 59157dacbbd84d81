"""What torch's profiler shows of calls."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from sdp_plugins.core import CollectiveMismatchError
from tests.ranks import HANG_S, run_ranks
from tests.torch.accelerator import TIERS, device_group
from tests.torch.jobs import process_group, total, values


def events(profiled: Any) -> list[Any]:
    return [event for event in profiled.events() if event.name.startswith("smddp:")]


def calls(rank: int, world: int, device: str) -> None:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        tensor, many = values(rank, 4).to(device), torch.empty(4 * world, device=device)
        dist.all_reduce(tensor)
        assert torch.equal(tensor.cpu(), total(world, 4))
        pending = dist.all_reduce(torch.ones(2, 3, device=device), async_op=True)
        dist.broadcast(tensor, 0)
        dist.all_gather_into_tensor(many, tensor)
        dist.reduce_scatter_tensor(tensor, many)
        dist.all_to_all_single(many, many.clone())
        pending.wait()
        dist.all_reduce(torch.eye(3).to_sparse())
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor)
        dist.barrier()
    assert [(event.name, event.input_shapes) for event in events(seen)] == [
        ("smddp:all_reduce", [[4]]),
        ("smddp:all_reduce", [[2, 3]]),
        ("smddp:broadcast", [[4]]),
        ("smddp:all_gather", [[4]]),
        ("smddp:reduce_scatter", [[4 * world]]),
        ("smddp:all_to_all", [[4 * world]]),
        ("smddp:sparse_all_reduce", [[3, 3]]),
        ("smddp:send" if rank == 0 else "smddp:recvAnySource", [[4]]),
        ("smddp:barrier", []),
    ]
    assert all(event.is_async for event in events(seen))


def run_calls(rank: int, world: int) -> None:
    with process_group():
        calls(rank, world, "cpu")


def test_calls_are_events(rank_pool: Any) -> None:
    rank_pool(2).run(run_calls)


def run_calls_on_device(rank: int, world: int, tier: str) -> None:
    with device_group(tier):
        calls(rank, world, "simdev")


@pytest.mark.parametrize("tier", TIERS)
def test_calls_on_a_device_are_events(tier: str) -> None:
    run_ranks(2, run_calls_on_device, tier)


def run_ddp(rank: int, world: int) -> None:
    with process_group():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 5), bucket_cap_mb=1)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            model(torch.ones(2, 5)).sum().backward()
    assert "smddp:all_reduce" in {event.name for event in events(seen)}


def test_buckets_are_events(rank_pool: Any) -> None:
    rank_pool(2).run(run_ddp)


def run_busy_callback(rank: int, world: int) -> None:
    """A callback that runs for long keeps no other operation from being done."""
    with process_group(), profile(activities=[ProfilerActivity.CPU]):
        go_on = threading.Event()
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        called = future.then(lambda _: go_on.wait(HANG_S))
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        assert not called.done()
        go_on.set()
        assert called.wait()


def test_a_callback_does_not_hold_events_up(rank_pool: Any) -> None:
    rank_pool(2).run(run_busy_callback)


def run_failure(rank: int, world: int) -> None:
    """Events of what fails end, too; the profiler does not hide the error."""
    with process_group():
        with (
            pytest.raises(CollectiveMismatchError),
            profile(activities=[ProfilerActivity.CPU]) as seen,
        ):
            dist.all_reduce(torch.ones(3 + rank))
        assert [event.name for event in events(seen)] == ["smddp:all_reduce"]
        assert events(seen)[0].is_async


def test_failures_are_events(rank_pool: Any) -> None:
    rank_pool(2).run(run_failure)
