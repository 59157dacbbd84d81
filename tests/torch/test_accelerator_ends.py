"""Groups that end, or are forked or interrupted, while an accelerator works for them."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp_plugins.core import (
    CollectiveMismatchError,
    SdpError,
)
from tests import simdev
from tests.faults import wait_for_go
from tests.leaks import no_leaks
from tests.ranks import run_ranks, say, start_ranks
from tests.torch.accelerator import TIERS, device_group, load
from tests.torch.jobs import assert_same

tiers = pytest.mark.parametrize("tier", TIERS)
BIG = 3_000_001


ENDS: dict[str, Callable[[Any], None]] = {
    "destroy": lambda group: dist.destroy_process_group(),
    "abort": lambda group: group.abort(),
    "shutdown": lambda group: group.shutdown(),
}


def meet(rank: int, world: int, file: Path) -> None:
    """Make the default group again: the first one's port may not be free yet."""
    dist.init_process_group("smddp", init_method=f"file://{file}", rank=rank, world_size=world)


def end_in_flight(
    rank: int, world: int, tier: str, how: str, arrives_s: float, folder: Path
) -> None:
    load(tier)
    with device_group(tier):  # what torch keeps of the first group
        dist.barrier()
    with no_leaks():
        meet(rank, world, folder / "meet")
        tensor, gate = torch.ones(BIG, device="simdev"), simdev.gate()
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        torch.accelerator.synchronize()
        tensors = [tensor.clone() for _ in range(13)]  # calls on one would wait for each other
        if rank == 1:
            gate.block()
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors[:10]]
        works += [dist.broadcast(tensor, 0, async_op=True) for tensor in tensors[10:]]
        dist.barrier()  # a rank that ends before would fail the other's calls
        timer = threading.Timer(arrives_s, gate.open)
        timer.start()
        with suppress(SdpError):  # a peer has left before
            ENDS[how](dist.group.WORLD)
        timer.join()
        torch.accelerator.synchronize()
        for work in works if tier == "threaded" else works[10:]:
            with suppress(SdpError):
                work.wait()
        with suppress(SdpError):
            dist.destroy_process_group() if dist.is_initialized() else None
        assert simdev.registered() == {}
        del works, work, tensors


@tiers
@pytest.mark.parametrize("arrives_s", [1.0, 4.0])  # the core of a closed group waits 2 s for it
@pytest.mark.parametrize("how", ENDS)
def test_an_end_in_flight(tier: str, how: str, arrives_s: float, tmp_path: Path) -> None:
    run_ranks(2, end_in_flight, tier, how, arrives_s, tmp_path)


def end_with_results(rank: int, world: int) -> None:
    """A process group ends when a reduction whose result the program uses has not begun."""
    load("flagged")
    dist.init_process_group("smddp")
    tensor, gate = torch.ones(BIG, device="simdev"), simdev.gate()
    dist.all_reduce(tensor)
    if rank == 1:
        gate.block()
        threading.Timer(2.0, gate.open).start()
    dist.all_reduce(tensor)  # orders the stream, and returns
    dist.destroy_process_group()
    assert_same(tensor.cpu(), torch.full((BIG,), 4.0))


def test_results_come_before_the_end() -> None:
    run_ranks(2, end_with_results)


def end_and_begin(rank: int, world: int, tier: str, folder: Path) -> None:
    load(tier)
    tensor = torch.ones(BIG, device="simdev")
    for count in range(5):
        with no_leaks(ignore=("fds",) if count == 0 else ()):
            meet(rank, world, folder / str(count))
            groups = [dist.new_group() for _ in range(3)]
            for group in (None, *groups):
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
                dist.broadcast(tensor, 0, group=group)
            for group in (groups[1], groups[0]):
                dist.destroy_process_group(group)
                dist.all_reduce(tensor, dist.ReduceOp.MAX)
                dist.all_reduce(tensor, dist.ReduceOp.MAX, group=groups[2])
            del group, groups
            dist.destroy_process_group()
            assert_same(tensor.cpu(), torch.ones(BIG))
            assert simdev.registered() == {}
        print("round", count)


@tiers
def test_five_groups_in_one_process(tier: str, tmp_path: Path) -> None:
    run_ranks(2, end_and_begin, tier, tmp_path)


def forget_a_group(rank: int, world: int, tier: str) -> None:
    load(tier)
    dist.init_process_group("smddp")
    tensor = torch.ones(BIG, device="simdev")
    kind = type(dist.group.WORLD)
    before = len(simdev.registered())
    group = dist.new_group()
    for _ in range(3):
        dist.all_reduce(tensor, group=group, async_op=True)
        dist.broadcast(tensor, 0, group=group, async_op=True)
    torch.accelerator.synchronize()
    here = weakref.ref(group)
    dist.barrier()
    world_of = dist.distributed_c10d._world
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag"):
        getattr(world_of, name).pop(group, None)
    for groups in world_of.tags_to_pg.values():
        while group in groups:
            groups.remove(group)
    dist.distributed_c10d._unregister_process_group(group.group_name)
    del group, groups
    gc.collect()
    print(kind, gc.get_referrers(here()) if here() else None)
    assert here() is None
    assert len(simdev.registered()) == before
    dist.destroy_process_group()
    assert simdev.registered() == {}


@tiers
def test_a_forgotten_group(tier: str) -> None:
    run_ranks(2, forget_a_group, tier)


def exit_without_destroy(rank: int, world: int, tier: str, in_flight: bool) -> None:
    load(tier)
    dist.init_process_group("smddp")
    tensor = torch.ones(BIG, device="simdev")
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    if in_flight:
        tensors = [tensor.clone() for _ in range(10)]  # calls on one would wait for each other
        simdev.gate().block()
        for one, other in zip(tensors[::2], tensors[1::2], strict=True):
            dist.all_reduce(one, async_op=True)
            dist.broadcast(other, 0, async_op=True)
    else:
        torch.accelerator.synchronize()


@tiers
@pytest.mark.parametrize("in_flight", [False, True])
def test_an_exit_without_destroy(tier: str, in_flight: bool) -> None:
    run_ranks(2, exit_without_destroy, tier, in_flight)


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def fork_in_flight(rank: int, world: int, tier: str) -> None:
    with device_group(tier):
        tensor, gate = torch.ones(BIG, device="simdev"), simdev.gate()
        dist.all_reduce(tensor)
        gate.block()
        tensors = [torch.ones(BIG, device="simdev") for _ in range(3)]
        works = [dist.all_reduce(one, async_op=True) for one in tensors]
        works.append(dist.broadcast(tensor, 0, async_op=True))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for call in (lambda: works[-1].wait(), lambda: dist.all_reduce(tensor)):
                    with pytest.raises(SdpError):
                        call()
                works.clear()
                gc.collect()
                code = 0
            finally:
                os._exit(code)
        batches = list(torch.utils.data.DataLoader(Numbers(), 2, num_workers=2))
        assert len(batches) == 4
        assert os.waitpid(pid, 0)[1] == 0
        gate.open()
        for work in works:
            work.wait()
        for one in (tensor, *tensors):
            assert_same(one.cpu(), torch.full((BIG,), float(world)))


@tiers
def test_a_fork_in_flight(tier: str) -> None:
    run_ranks(2, fork_in_flight, tier)


def wait_in_vain(rank: int, world: int, tier: str) -> None:
    with device_group(tier):
        tensor, other = torch.ones(BIG, device="simdev"), torch.ones(BIG, device="simdev")
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        if rank == 1:
            wait_for_go()
            return
        works = [dist.broadcast(tensor, 0, async_op=True)]
        works += [dist.all_reduce(other, async_op=True)] if tier == "threaded" else []
        for work in works:
            for wait in (work.wait, work.get_future().wait):
                say("waiting")
                with pytest.raises(KeyboardInterrupt):
                    wait()
                say("interrupted")


@tiers
def test_ctrl_c(tier: str) -> None:
    with start_ranks(2, wait_in_vain, tier) as ranks:
        for _ in range(4 if tier == "threaded" else 2):
            assert ranks[0].heard() == "waiting"
            ranks[0].until_asleep()
            ranks[0].kill(signal.SIGINT)
            assert ranks[0].heard() == "interrupted"
        ranks[1].kill(signal.SIGKILL)


def run_in_detail(rank: int, world: int, tier: str) -> list[str]:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    with device_group(tier):
        tensor = torch.ones(10, device="simdev")
        with torch.profiler.profile() as profile:
            dist.all_reduce(tensor)
            dist.broadcast(tensor, 0)
            torch.accelerator.synchronize()
        assert_same(tensor.cpu(), torch.full((10,), float(world)))
        for call in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0)):
            with pytest.raises(CollectiveMismatchError, match=r"\(2, 5\).*\(5, 2\)|\(5, 2\).*\(2"):
                call(tensor.view((2, 5) if rank else (5, 2)))
        return [event.name for event in profile.events()]


@tiers
def test_in_detail(tier: str) -> None:
    for names in run_ranks(2, run_in_detail, tier):
        assert "aten::as_strided" in names
