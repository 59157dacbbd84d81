"""What a job with tensors on an accelerator sees when a rank, or its device, fails."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from sdp_plugins.core import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    SdpError,
)
from sdp_plugins.torch.accelerator import pieces, pinned_ring
from tests import simdev
from tests.conftest import Pools
from tests.faults import die, wait_for_go
from tests.log_lines import logged
from tests.ranks import run_ranks, say, start_ranks
from tests.torch import models
from tests.torch.accelerator import TIERS, device_group, load
from tests.torch.jobs import assert_same
from tests.torch.probe import DEVICE_POOL, SLOT_NBYTES

tiers = pytest.mark.parametrize("tier", TIERS)
BIG = 3_000_001
SHORT = timedelta(seconds=2)


def tensors_of(count: int) -> list[torch.Tensor]:
    return [torch.ones(BIG if i % 3 == 0 else 1000, device="simdev") for i in range(count)]


def call_until_it_fails(call: Callable[[], Any]) -> None:
    """With flags, the call after the one that fails raises."""
    while True:
        call()
        torch.accelerator.synchronize()


def until_ended(rank: int) -> None:
    """Return when a rank's process has ended, or the test's time-out."""
    while rank not in dist.group.WORLD.ended():
        time.sleep(0.01)


def check_lost(tier: str, works: list[Any], tensors: list[torch.Tensor], pattern: str) -> None:
    """Every stream goes on, every handle raises, and so does every later call."""
    if tier == "threaded":
        for work in works:
            with pytest.raises(PeerLostError, match=pattern) as caught:
                work.wait()
            assert caught.value.ranks == (1,)
    torch.accelerator.synchronize()
    for tensor in tensors if tier == "flagged" else ():
        assert tensor.isnan().any().item()
    if tier == "flagged" and not works:
        tensor = torch.ones(BIG, device="simdev")
        with suppress(PeerLostError):  # the core may have noticed before the last piece is issued
            works = [dist.all_reduce(tensor, async_op=True)]
            torch.accelerator.synchronize()
            assert tensor.isnan().any().item()
    for _ in range(20):
        with pytest.raises(PeerLostError, match=pattern):
            dist.all_reduce(torch.ones(BIG, device="simdev"))
    for work in works:
        with pytest.raises(PeerLostError, match=pattern):
            work.wait(timedelta(seconds=100))
        assert work.is_completed() and not work.is_success()


def lose_a_peer(rank: int, world: int, tier: str, is_copied: bool, count: int) -> None:
    with device_group(tier):
        dist.all_reduce(torch.ones(5, device="simdev"))
        tensors, gate = tensors_of(count), simdev.gate()
        if rank != 1:
            if not is_copied:
                gate.block()
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        say("issued")
        until_ended(1)
        gate.open()
        check_lost(tier, works, tensors, r"all_reduce #\d+.*rank 1 .*Hint: ")


@tiers
@pytest.mark.parametrize("count", [0, pytest.param(1, marks=pytest.mark.long), 20])
@pytest.mark.parametrize("is_copied", [False, True])
def test_a_killed_peer(tier: str, is_copied: bool, count: int) -> None:
    with start_ranks(3, lose_a_peer, tier, is_copied, count) as ranks:
        for rank in ranks:
            assert rank.heard() == "issued"
        ranks[1].kill(signal.SIGKILL)
        for survivor in (ranks[0], ranks[2]):
            survivor.result()
            assert survivor.finish() == 0


def train_until_lost(rank: int, world: int, tier: str, hook: bool) -> None:
    with device_group(tier):
        model = models.wrap(models.Plain, None, "simdev")
        if hook:
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        models.train(model, rank)
        say("training")
        # torch reads what a hook's future holds in C++, which raises errors of its own.
        kind = RuntimeError if hook else PeerLostError
        with pytest.raises(kind, match=r"all_reduce #\d+.*rank 1 .*Hint: "):
            models.train(model, rank, steps=1_000_000)
        torch.accelerator.synchronize()
        with pytest.raises(RuntimeError):  # DDP may see its unfinished backward pass first
            models.loss_of(model, models.batch(rank, 1)).backward()
        if tier == "flagged":
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            assert any(gradient.isnan().any().item() for gradient in gradients)


@tiers
@pytest.mark.parametrize("hook", [False, True])
def test_a_killed_peer_in_ddp(tier: str, hook: bool) -> None:
    with start_ranks(2, train_until_lost, tier, hook) as ranks:
        for rank in ranks:
            assert rank.heard() == "training"
        ranks[1].kill(signal.SIGKILL)
        ranks[0].result()
        assert ranks[0].finish() == 0


def fail_at_the_end(rank: int, world: int, tier: str) -> None:
    """Nothing comes after the reduction that fails but destroy_process_group()."""
    load(tier)
    dist.init_process_group("smddp")
    tensor = torch.ones(BIG, device="simdev")
    dist.all_reduce(tensor)
    if rank == 1:
        die("dies")
    pattern = r"all_reduce #\d+.*rank 1 .*Hint: "
    if tier == "threaded":
        with pytest.raises(PeerLostError, match=pattern):
            dist.all_reduce(tensor)
    else:
        dist.all_reduce(tensor)
        torch.accelerator.synchronize()
        assert tensor.isnan().all()
        with pytest.raises(PeerLostError, match=pattern):
            dist.destroy_process_group()
    dist.destroy_process_group()
    assert simdev.registered() == {}


@tiers
def test_a_failure_that_nobody_has_seen_is_raised_by_destroy(tier: str) -> None:
    with start_ranks(2, fail_at_the_end, tier) as ranks:
        ranks[0].result()


def wait_for_a_stopped_peer(rank: int, world: int, tier: str) -> None:
    with device_group(tier, timeout=SHORT):
        tensor = torch.ones(BIG, device="simdev")
        dist.all_reduce(tensor)
        torch.accelerator.synchronize()
        if rank == 1:
            wait_for_go()
            return
        pattern = r"all_reduce #\d+.*rank 1 .*did not arrive.*Hint: "
        with pytest.raises(CollectiveTimeoutError, match=pattern) as caught:
            call_until_it_fails(lambda: dist.all_reduce(tensor))
        assert caught.value.ranks == (1,)


@tiers
def test_a_stopped_peer(tier: str) -> None:
    with start_ranks(2, wait_for_a_stopped_peer, tier) as ranks:
        assert ranks[1].heard() == "waiting"
        ranks[1].kill(signal.SIGSTOP)
        ranks[0].result()
        ranks[1].kill(signal.SIGCONT)


def hang(rank: int, world: int, tier: str, name: str) -> None:
    with device_group(tier, timeout=SHORT if rank == 1 else timedelta(seconds=100)):
        tensor, gate = torch.ones(BIG, device="simdev"), simdev.gate()
        call = getattr(dist, name)
        arguments = (0,) if name == "broadcast" else ()
        call(tensor, *arguments)
        if rank == 1:
            gate.block()
            work = call(tensor, *arguments, async_op=True)
        dist.barrier()  # the other ranks' time begins later
        if rank != 1:
            work = call(tensor, *arguments, async_op=True)
        with pytest.raises(SdpError, match=rf"{name}.*rank 1's device has not reached.*Hint: "):
            work.wait(timedelta(seconds=50))
        gate.open()
        with pytest.raises(SdpError, match="device has not reached"):
            call(tensor, *arguments)
        torch.accelerator.synchronize()


@tiers
@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_a_device_that_hangs(tier: str, name: str, rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(hang, tier, name)


DISAGREEMENTS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "size": lambda tensor, rank: dist.all_reduce(tensor[rank:]),
    "pieces": lambda tensor, rank: dist.all_reduce(tensor[: 2 ** (20 + rank)]),
    "empty": lambda tensor, rank: dist.all_reduce(tensor[: 10 * rank]),
    "dtype": lambda tensor, rank: dist.all_reduce(tensor.view([torch.float32, torch.int32][rank])),
    "op": lambda tensor, rank: dist.all_reduce(
        tensor, (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank]
    ),
    "root": lambda tensor, rank: dist.broadcast(tensor, rank),
    "device": lambda tensor, rank: dist.all_reduce(tensor.cpu() if rank else tensor),
    "call": lambda tensor, rank: dist.broadcast(tensor, 0) if rank else dist.all_reduce(tensor),
}


def disagree(rank: int, world: int, tier: str, what: str) -> Any:
    with device_group(tier) as group:
        tensor = torch.ones(BIG, device="simdev")
        for _ in range(2):
            dist.all_reduce(tensor)
            dist.broadcast(tensor, 0)
            dist.all_reduce(torch.ones(3))
        torch.accelerator.synchronize()
        dist.barrier()
        group._set_default_timeout(SHORT)
        with pytest.raises(SdpError) as caught:
            call_until_it_fails(lambda: DISAGREEMENTS[what](tensor, rank))
        return type(caught.value).__name__, str(caught.value)


@tiers
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree(tier: str, what: str, rank_pools: Pools) -> None:
    for kind, text in rank_pools.pool(2, DEVICE_POOL).run(disagree, tier, what):
        print(kind, text)
        assert "rank 0" in text and "rank 1" in text and "Hint" in text, text


def fail_between_pieces(rank: int, world: int) -> None:
    """The group fails after the first pieces of a call: the call raises it, and nothing later."""
    with ExitStack() as stack:
        for module in (pieces, pinned_ring):  # so that a call has more pieces than slots
            stack.enter_context(mock.patch.object(module, "SLOT_NBYTES", SLOT_NBYTES))
        group = stack.enter_context(device_group("flagged"))
        tensor = torch.ones(BIG, device="simdev")
        dist.all_reduce(tensor)
        (device,) = group._calls_on_device()._devices.values()
        core_group = device.flagged.group
        enqueue, calls = core_group.all_reduce_at_flags, 0

        def enqueue_later(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            while calls == 2 and core_group.failure is None:
                time.sleep(0.001)
            return enqueue(*args)

        stack.enter_context(mock.patch.object(core_group, "all_reduce_at_flags", enqueue_later))
        with pytest.raises(CollectiveMismatchError):
            dist.all_reduce(tensor[: 2 ** (20 + rank)])
        assert calls == 2


def test_a_failure_between_pieces_is_raised_once(rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(fail_between_pieces)


def fail_a_device(rank: int, world: int, tier: str, name: str) -> str:
    simdev.load()
    with device_group(tier):
        tensor = torch.ones(BIG, device="simdev")
        call = {
            "all_reduce": lambda: dist.all_reduce(tensor, async_op=True),
            "broadcast": lambda: dist.broadcast(tensor, 0, async_op=True),
        }[name]
        call().wait()
        torch.accelerator.synchronize()
        if rank == 1:
            simdev.fail_next("the device is on fire")
            tensor += 1
        with pytest.raises(RuntimeError) as caught:
            call_until_it_fails(lambda: call().wait())
        if rank == 1:
            dist.destroy_process_group()
            simdev.reset()
            dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)
        return f"{type(caught.value).__name__} {caught.value}"


@tiers
@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_a_device_that_fails(tier: str, name: str, rank_pools: Pools) -> None:
    peers, own = rank_pools.pool(2, DEVICE_POOL).run(fail_a_device, tier, name)
    assert own == "RuntimeError the device is on fire"
    assert peers.startswith("PeerLostError") and name in peers
    assert "rank 1 gave up: RuntimeError: the device is on fire" in peers


def pass_wrong_arguments(rank: int, world: int, tier: str) -> None:
    with device_group(tier):
        tensor = torch.ones(10, device="simdev")
        wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (ValueError, "elements", lambda: dist.all_gather_into_tensor(tensor, tensor)),
            (TypeError, "float8", lambda: dist.all_reduce(tensor.to(torch.float8_e5m2))),
            (ValueError, "band", lambda: dist.all_reduce(tensor, dist.ReduceOp.BAND)),
            (ValueError, "band", lambda: dist.reduce(tensor, 0, dist.ReduceOp.BAND)),
            (ValueError, "to one device", lambda: dist.all_gather([tensor] * world, tensor.cpu())),
            (
                ValueError,
                "to one device",
                lambda: dist.all_reduce_coalesced([tensor, tensor.to("simdev:1")]),
            ),
            (ValueError, "device", lambda: dist.all_reduce_coalesced([tensor, tensor.cpu()])),
            (ValueError, "device", lambda: dist.all_reduce_coalesced([tensor.cpu(), tensor])),
            (ValueError, "meta", lambda: dist.all_reduce_coalesced([tensor, tensor.to("meta")])),
            (ValueError, "meta", lambda: dist.broadcast(tensor.to("meta"), 0)),
            (ValueError, "rank 7|root", lambda: dist.broadcast(tensor, 7)),
        ]
        for kind, text, call in wrong * 20:  # more often than there are slots
            with pytest.raises(kind, match=f"(?i){text}"):
                call()
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        assert_same(tensor.cpu(), torch.full((10,), float(world)))


@tiers
def test_wrong_arguments(tier: str, rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(pass_wrong_arguments, tier)


def talk_without_the_third(rank: int, world: int, tier: str) -> None:
    with device_group(tier):
        tensor = torch.full((10,), float(rank), device="simdev")
        if rank == 0:
            dist.send(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            assert tensor.sum().item() == 0
        dist.barrier()


@tiers
def test_messages_take_two_ranks(tier: str, rank_pools: Pools) -> None:
    rank_pools.pool(3, DEVICE_POOL).run(talk_without_the_third, tier)


def run_out_of_pinned_memory(rank: int, world: int, tier: str, late: bool) -> Any:
    with logged("sdp_plugins") as lines, device_group(tier):
        tensor = torch.ones(BIG, device="simdev")
        if late:
            dist.all_reduce(tensor)
        if rank == 1:
            simdev.set_pin_limit(0)
        for _ in range(3):
            tensor.fill_(rank)
            dist.all_reduce(tensor)
            assert_same(tensor.cpu(), torch.ones(BIG))
            tensor.fill_(rank)
            dist.broadcast(tensor, 1)
            assert_same(tensor.cpu(), torch.ones(BIG))
        second = torch.ones(10, device="simdev:1")
        dist.all_reduce(second)
        dist.all_reduce(tensor)
        assert second.sum().item() == 20 and tensor.sum().item() == 2 * BIG
    return lines


@tiers
@pytest.mark.parametrize("late", [False, True])
def test_no_pinned_memory_on_one_rank(tier: str, late: bool) -> None:
    first, second = run_ranks(2, run_out_of_pinned_memory, tier, late)
    assert first == []
    assert len(second) == len(set(second)) == (1 if late else 2)  # one for each device
    assert all("ulimit -l" in line for line in second)


def call_back_badly(rank: int, world: int, tier: str) -> None:
    def raises(future: Any) -> None:
        raise KeyError("a bug in a callback")

    with device_group(tier):
        tensor = torch.ones(10, device="simdev")
        for call in (
            lambda: dist.all_reduce(tensor, async_op=True),
            lambda: dist.broadcast(tensor, 0, async_op=True),
        ):
            with pytest.raises(Exception, match="a bug in a callback"):
                call().get_future().then(raises).wait()
        model = models.wrap(models.Plain, None, "simdev")

        def hook(state: Any, bucket: Any) -> Any:
            if state:
                raise KeyError("a bug in a hook")
            future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(raises)

        hook.__annotations__.clear()  # torch does not understand texts
        model.register_comm_hook(rank == 1, hook)
        with pytest.raises(Exception, match="a bug in a hook" if rank else "a bug in a callback"):
            models.train(model, rank)
        del model
        with suppress(PeerLostError):  # rank 1 has made fewer calls
            dist.destroy_process_group()
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)


@tiers
def test_callbacks_that_raise(tier: str, rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(call_back_badly, tier)
