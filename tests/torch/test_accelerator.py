"""Collectives on tensors of the simulated accelerator: bit by bit what they are on CPU tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sdp_plugins.torch.streams import on
from sdp_plugins.torch.tensors import copy_values
from tests import simdev
from tests.conftest import Pools
from tests.ranks import run_ranks
from tests.torch.accelerator import TIERS, device_group, load
from tests.torch.jobs import DTYPES, assert_same, total, values
from tests.torch.probe import DEVICE_POOL, gated

SIZES = (0, 1, 1000, 3_000_001)  # the last in several pieces, of which none is aligned
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def reduced(tensor: Tensor, op: Any) -> Tensor | str:
    """The result of an all_reduce, or the type of its error."""
    try:
        dist.all_reduce(tensor, op)
    except (TypeError, ValueError) as error:
        return type(error).__name__
    return tensor.cpu()


def run_all_reduce(rank: int, world: int, tier: str) -> None:
    types = [*DTYPES, torch.bool, torch.complex64, torch.complex128, torch.float8_e5m2]
    with device_group(tier):
        for dtype in types:
            for op in OPS:
                data = values(rank, 1000).to(dtype)
                on_cpu = reduced(data.clone(), getattr(dist.ReduceOp, op))
                on_device = reduced(data.to("simdev"), getattr(dist.ReduceOp, op))
                if isinstance(on_cpu, str):
                    assert on_device == on_cpu, (dtype, op)
                else:
                    assert_same(on_device, on_cpu)
        for count in SIZES:
            assert_same(
                reduced(values(rank, count).to("simdev"), dist.ReduceOp.SUM), total(world, count)
            )
        premul = dist._make_nccl_premul_sum(0.5)
        assert_same(reduced(values(rank, 9).to("simdev"), premul), reduced(values(rank, 9), premul))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_reduce(tier: str, world: int, rank_pools: Pools) -> None:
    rank_pools.pool(world, DEVICE_POOL).run(run_all_reduce, tier)


def run_layouts(rank: int, world: int, tier: str) -> None:
    made: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.t(),
        lambda x: x[::2, 1:],
        lambda x: x.view(4, 5, 5, 2).to(memory_format=torch.channels_last),
        lambda x: x.requires_grad_(),
        lambda x: x[0, :2][::2],
        lambda x: x[:, :1].clone().expand(20, 3),
    ]
    with device_group(tier):
        for make in made:
            results = []
            for device in ("cpu", "simdev"):
                tensor = make(values(rank, 200).view(20, 10).to(device))
                dist.all_reduce(tensor)
                results.append(tensor.detach().cpu().resolve_conj().resolve_neg())
            assert_same(results[1], results[0])
        with torch.inference_mode():
            tensor = values(rank, 10).to("simdev")
            dist.all_reduce(tensor)
        assert_same(tensor.cpu(), total(world, 10))


def run_bound_to_a_device(rank: int, world: int, tier: str) -> None:
    load(tier)  # before torch knows the name
    where = torch.device("simdev", 0)
    with device_group(tier, device_id=where):  # as Lightning and accelerate do on GPUs
        groups = [(None, world), (dist.new_group([0]), 1)]  # torch also tells those not in it
        if dist.group.WORLD.bound_device_id:  # since version 2.14, torch lets us be split then
            groups.append((dist.split_group(split_ranks=[[r] for r in range(world)]), 1))
        for group, ranks in groups:
            if group == dist.GroupMember.NON_GROUP_MEMBER:
                continue
            tensor = torch.ones(5, device=where)
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [ranks] * 5
        dist.barrier()
        dist.all_gather_object([None] * world, rank)


@pytest.mark.parametrize("tier", TIERS)
def test_group_is_bound_to_a_device(tier: str, rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(run_bound_to_a_device, tier)


def test_sparse_values_are_copied() -> None:
    """To a device; the simulated one has no sparse tensors."""
    target = torch.zeros(3, 2).to_sparse()
    copy_values(target, torch.eye(3, 2).to_sparse())
    assert_same(target.to_dense(), torch.eye(3, 2))


@pytest.mark.parametrize("tier", TIERS)
def test_layouts(tier: str, rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(run_layouts, tier)


def all_others(rank: int, world: int, device: str) -> list[Tensor]:
    """Every other collective, and messages; what they have put out."""
    mine = values(rank, 12).to(device)

    def empty(count: int) -> Tensor:
        return torch.zeros(count, device=device)

    def parts(count: int) -> list[Tensor]:
        return [empty(count) for _ in range(world)]

    out: list[Tensor] = []
    for root in range(world):
        sent = mine.clone()
        dist.broadcast(sent, root)
        summed = mine.clone()
        dist.reduce(summed, root)
        gathered = parts(12)
        dist.gather(mine, gathered if rank == root else None, root)
        scattered = empty(12)
        dist.scatter(scattered, [mine + i for i in range(world)] if rank == root else None, root)
        out += [sent, *gathered, scattered, *([summed] if rank == root else [])]
    gathered = parts(12)
    dist.all_gather(gathered, mine)
    out += gathered
    uneven = [empty(r + 1) for r in range(world)]
    dist.all_gather(uneven, mine[: rank + 1])
    out += uneven
    whole = empty(12 * world)
    dist.all_gather_into_tensor(whole, mine)
    part = empty(12)
    dist.reduce_scatter_tensor(part, whole, op=dist.ReduceOp.AVG)
    listed = empty(12)
    dist.reduce_scatter(listed, [mine * (i + 1) for i in range(world)])
    swapped = empty(12)
    dist.all_to_all_single(swapped, mine, [12 // world] * world, [12 // world] * world)
    received = parts(2)
    dist.all_to_all(received, [mine[:2] * (i + 1) for i in range(world)])
    out += [whole, part, listed, swapped, *received]
    one, two = mine.clone(), mine * 2
    dist.all_reduce_coalesced([one, two])
    out += [one, two]
    several = [empty(12 * world) for _ in range(2)]
    dist.group.WORLD.allgather_into_tensor_coalesced(several, [mine, mine + 1]).wait()
    out += several
    out += messages(rank, world, mine)
    sub = dist.new_group([0, 1])
    if rank < 2:
        shared = mine.clone()
        dist.all_reduce(shared, group=sub)
        out.append(shared)
    dist.barrier()
    return [tensor.cpu() for tensor in out]


def messages(rank: int, world: int, mine: Tensor) -> list[Tensor]:
    """Each rank sends to the next one: blocking, at once, from any rank, in a batch."""
    to, source = (rank + 1) % world, (rank - 1) % world
    first, second, third, fourth = (torch.zeros_like(mine) for _ in range(4))
    if rank % 2:
        dist.recv(first, source)
        dist.send(mine, to)
    else:
        dist.send(mine, to)
        dist.recv(first, source)
    receiving = dist.irecv(second, source, tag=7)
    dist.isend(mine * 3, to, tag=7).wait()
    receiving.wait()
    receiving = dist.irecv(third, tag=8)
    dist.isend(mine * 4, to, tag=8).wait()
    receiving.wait()
    assert receiving._source_rank() == source
    operations = [dist.P2POp(dist.irecv, fourth, source), dist.P2POp(dist.isend, mine * 5, to)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [first, second, third, fourth]


def run_others(rank: int, world: int, tier: str) -> None:
    with device_group(tier):
        on_cpu = all_others(rank, world, "cpu")
        assert_same(all_others(rank, world, "simdev"), on_cpu)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("world", [2, 3])
def test_all_other_calls(tier: str, world: int, rank_pools: Pools) -> None:
    rank_pools.pool(world, DEVICE_POOL).run(run_others, tier)


def run_message_between_two(rank: int, world: int, tier: str) -> None:
    """The others make no call, so that a message must not make a group."""
    with device_group(tier):
        if rank == 1:
            dist.send(values(rank, 10).to("simdev"), 2)
        elif rank == 2:
            received = torch.zeros(10, device="simdev")
            dist.recv(received, 1)
            assert_same(received.cpu(), values(1, 10))
        dist.barrier()


@pytest.mark.parametrize("tier", TIERS)
def test_message_between_two_of_three(tier: str, rank_pools: Pools) -> None:
    rank_pools.pool(3, DEVICE_POOL).run(run_message_between_two, tier, timeout_s=40)


def run_mixed_with_cpus(rank: int, world: int, tier: str) -> None:
    """Calls on tensors of both kinds, by turns, many at a time."""
    with device_group(tier):
        tensors = [values(rank, 5000).to(d) for d in ("simdev", "cpu") * 40]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        for tensor in tensors:
            assert_same(tensor.cpu(), total(world, 5000))
        second = values(rank, 100).to("simdev:1")
        dist.all_reduce(second)
        assert_same(second.cpu(), total(world, 100))
        with pytest.raises(ValueError, match=r"on simdev:0 and on cpu. Hint"):
            dist.all_gather_into_tensor(torch.empty(10 * world, device="simdev"), torch.ones(10))
        with pytest.raises(ValueError, match="meta tensor has no data"):
            dist.all_reduce(torch.ones(3, device="meta"))


@pytest.mark.parametrize("tier", TIERS)
def test_mixed_with_cpus(tier: str, rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(run_mixed_with_cpus, tier)


def run_no_pinned_memory(rank: int, world: int, tier: str) -> Any:
    with device_group(tier):
        simdev.set_pin_limit(0)
        tensor = values(rank, 3_000_000).to("simdev")
        dist.all_reduce(tensor)
        assert_same(tensor.cpu(), total(world, 3_000_000))
        all_others(rank, world, "simdev")


@pytest.mark.parametrize("tier", TIERS)
def test_no_pinned_memory(tier: str, caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(2, run_no_pinned_memory, tier)


def run_capture(rank: int, world: int, tier: str) -> None:
    with device_group(tier):
        simdev.set_capturing(True)
        with pytest.raises(RuntimeError, match="cannot be captured in a graph of the device"):
            dist.all_reduce(torch.ones(3, device="simdev"))
        simdev.set_capturing(False)
        dist.all_reduce(torch.ones(3, device="simdev"))


@pytest.mark.parametrize("tier", TIERS)
def test_capture_is_refused(tier: str, rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(run_capture, tier)


def run_second_device(rank: int, world: int, tier: str) -> None:
    """The current device is another one."""
    with device_group(tier):
        source, tensor = values(rank, 5000).to("simdev:1"), torch.zeros(5000, device="simdev:1")
        with gated(0.3, torch.accelerator.current_stream("simdev:1")):
            tensor.copy_(source)
            work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert_same(tensor.cpu(), total(world, 5000))


@pytest.mark.parametrize("tier", TIERS)
def test_a_device_that_is_not_the_current_one(tier: str, rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(run_second_device, tier)


def run_message_beside_reductions(rank: int, world: int, tier: str) -> None:
    """Messages do not wait for a collective that a peer has yet to call."""
    with device_group(tier):
        tensor, message = torch.ones(5000, device="simdev"), torch.ones(9, device="simdev")
        dist.all_reduce(tensor)
        if rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
        for turn in (rank, 1 - rank):
            dist.recv(message, 1 - rank) if turn == 0 else dist.send(message + rank, 1 - rank)
        torch.accelerator.current_stream().synchronize()
        if rank == 1:
            work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert_same(tensor.cpu(), torch.full((5000,), 4.0))


@pytest.mark.parametrize("tier", TIERS)
def test_messages_pass_reductions(tier: str, rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(run_message_beside_reductions, tier)


def run_ranks_that_differ(rank: int, world: int) -> None:
    """One rank does without flags, so all do: callbacks run in the same place on all ranks."""
    with device_group(TIERS[rank]):
        tensor = torch.ones(5000, device="simdev")
        future = dist.all_reduce(tensor, async_op=True).get_future()

        def again(done: Any) -> Tensor:
            return dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0]

        assert_same(future.then(again).wait().cpu(), torch.full((5000,), 4.0))


def test_ranks_that_differ_agree(rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(run_ranks_that_differ)


def run_streams_of_threads(rank: int, world: int, tier: str) -> None:
    """Two threads that are on one stream come back to their own."""
    simdev.load()
    shared, others = torch.Stream("simdev"), [torch.Stream("simdev") for _ in range(2)]
    barrier, ends = threading.Barrier(2), [0, 0]

    def enter(index: int) -> None:
        with on(others[index]):
            if index == 1:
                barrier.wait()
            with on(shared):
                if index == 0:
                    barrier.wait()
                barrier.wait()
            ends[index] = torch.accelerator.current_stream().stream_id

    threads = [threading.Thread(target=enter, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [other.stream_id for other in others]


def test_threads_share_no_stream_to_go_back_to(rank_pools: Pools) -> None:
    rank_pools.pool(1, DEVICE_POOL).run(run_streams_of_threads, "")
