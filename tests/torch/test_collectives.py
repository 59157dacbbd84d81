"""Every collective of c10d on smddp, blocking and asynchronous, against what it must give."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torch.jobs import DTYPES, assert_same, process_group, total, values

COUNTS = (0, 1, 7, 1000, 300_001)


def finish(work: Any, async_op: bool) -> None:
    """Wait where that is needed."""
    assert (work is not None) == async_op
    if isinstance(work, torch.futures.Future):  # what c10d returns from *_coalesced
        work.wait()
        assert work.done()
    elif work is not None:
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None


def all_reduce(rank: int, world: int, count: int, mode: bool) -> None:
    tensor = values(rank, count)
    finish(dist.all_reduce(tensor, async_op=mode), mode)
    assert_same(tensor, total(world, count))


def all_reduce_coalesced(rank: int, world: int, count: int, mode: bool) -> None:
    tensors = [values(rank, count), values(rank, 3), values(rank, 5)]
    finish(dist.all_reduce_coalesced(tensors, async_op=mode), mode)
    assert_same(tensors, [total(world, t.numel()) for t in tensors])


def reduce(rank: int, world: int, count: int, mode: bool) -> None:
    tensor = values(rank, count)
    finish(dist.reduce(tensor, world - 1, async_op=mode), mode)
    assert_same(tensor, total(world, count) if rank == world - 1 else values(rank, count))


def broadcast(rank: int, world: int, count: int, mode: bool) -> None:
    tensor = values(rank, count)
    finish(dist.broadcast(tensor, world - 1, async_op=mode), mode)
    assert_same(tensor, values(world - 1, count))


def all_gather(rank: int, world: int, count: int, mode: bool) -> None:
    outputs = [torch.empty(count) for _ in range(world)]
    finish(dist.all_gather(outputs, values(rank, count), async_op=mode), mode)
    assert_same(outputs, [values(r, count) for r in range(world)])


def all_gather_uneven(rank: int, world: int, count: int, mode: bool) -> None:
    outputs = [torch.empty(count + r) for r in range(world)]
    finish(dist.all_gather(outputs, values(rank, count + rank), async_op=mode), mode)
    assert_same(outputs, [values(r, count + r) for r in range(world)])


def all_gather_single(rank: int, world: int, count: int, mode: bool) -> None:
    output = torch.empty(world * count)
    finish(dist.all_gather_into_tensor(output, values(rank, count), async_op=mode), mode)
    assert_same(output, torch.cat([values(r, count) for r in range(world)]))


def all_gather_coalesced(rank: int, world: int, count: int, mode: bool) -> None:
    """A list for each rank, with what each of its tensors was, as over gloo."""
    sizes = (count, 3, 1)
    lists = [[torch.empty(n) for n in sizes] for _ in range(world)]
    inputs = [values(rank, n) for n in sizes]
    finish(dist.all_gather_coalesced(lists, inputs, async_op=mode), mode)
    assert_same(lists, [[values(r, n) for n in sizes] for r in range(world)])


def gather(rank: int, world: int, count: int, mode: bool) -> None:
    root = world - 1
    outputs = [torch.empty(count) for _ in range(world)] if rank == root else None
    finish(dist.gather(values(rank, count), outputs, root, async_op=mode), mode)
    if rank == root:
        assert_same(outputs, [values(r, count) for r in range(world)])


def scatter(rank: int, world: int, count: int, mode: bool) -> None:
    root, output = world - 1, torch.empty(count)
    inputs = [values(r, count) for r in range(world)] if rank == root else None
    finish(dist.scatter(output, inputs, root, async_op=mode), mode)
    assert_same(output, values(rank, count))


def reduce_scatter(rank: int, world: int, count: int, mode: bool) -> None:
    output = torch.empty(count)
    inputs = [values(rank + part, count) for part in range(world)]
    finish(dist.reduce_scatter(output, inputs, async_op=mode), mode)
    assert_same(output, total(world, count) + world * rank)
    assert_same(inputs, [values(rank + part, count) for part in range(world)])


def reduce_scatter_uneven(rank: int, world: int, count: int, mode: bool) -> None:
    output = torch.empty(count + rank)
    inputs = [values(rank, count + part) for part in range(world)]
    finish(dist.reduce_scatter(output, inputs, async_op=mode), mode)
    assert_same(output, total(world, count + rank))
    assert_same(inputs, [values(rank, count + part) for part in range(world)])


def reduce_scatter_single(rank: int, world: int, count: int, mode: bool) -> None:
    output = torch.empty(count)
    parts = torch.cat([values(rank + part, count) for part in range(world)])
    finish(dist.reduce_scatter_tensor(output, parts, async_op=mode), mode)
    assert_same(output, total(world, count) + world * rank)
    within = parts.view(world, count)[rank - 1]
    finish(dist.reduce_scatter_tensor(within, parts, async_op=mode), mode)
    assert_same(within, output)


def all_to_all(rank: int, world: int, count: int, mode: bool) -> None:
    outputs = [torch.empty(count + rank) for _ in range(world)]
    inputs = [values(10 * rank + to, count + to) for to in range(world)]
    finish(dist.all_to_all(outputs, inputs, async_op=mode), mode)
    assert_same(outputs, [values(10 * sender + rank, count + rank) for sender in range(world)])


def all_to_all_single(rank: int, world: int, count: int, mode: bool) -> None:
    output = torch.empty(world * count)
    parts = torch.cat([values(10 * rank + to, count) for to in range(world)])
    finish(dist.all_to_all_single(output, parts, async_op=mode), mode)
    assert_same(output, torch.cat([values(10 * r + rank, count) for r in range(world)]))
    finish(dist.all_to_all_single(parts, parts, async_op=mode), mode)
    assert_same(parts, output)


def all_to_all_splits(rank: int, world: int, count: int, mode: bool) -> None:
    """Rows of two elements; rank r gets r + 1 rows from everyone."""
    sent = [to + 1 for to in range(world)]
    rows = [values(10 * rank + to, 2 * (to + 1)).view(-1, 2) for to in range(world)]
    output = torch.empty(world * (rank + 1), 2)
    work = dist.all_to_all_single(output, torch.cat(rows), [rank + 1] * world, sent, async_op=mode)
    finish(work, mode)
    expected = [values(10 * r + rank, 2 * (rank + 1)).view(-1, 2) for r in range(world)]
    assert_same(output, torch.cat(expected))


def barrier(rank: int, world: int, count: int, mode: bool) -> None:
    finish(dist.barrier(async_op=mode), mode)


CASES = [
    all_reduce,
    all_reduce_coalesced,
    reduce,
    broadcast,
    all_gather,
    all_gather_uneven,
    all_gather_single,
    all_gather_coalesced,
    gather,
    scatter,
    reduce_scatter,
    reduce_scatter_uneven,
    reduce_scatter_single,
    all_to_all,
    all_to_all_single,
    all_to_all_splits,
    barrier,
]


def run_case(rank: int, world: int, name: str) -> None:
    """One collective with all counts, in both modes, in one group."""
    warnings.simplefilter("ignore", FutureWarning)  # torch renames some of them
    with process_group():
        for count in COUNTS:
            for async_op in (False, True):
                globals()[name](rank, world, count, async_op)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_collective(rank_pool: Any, case: Any, world: int) -> None:
    rank_pool(world).run(run_case, case.__name__)


OPS = {
    "SUM": lambda stack: stack.sum(0),
    "PRODUCT": lambda stack: stack.prod(0),
    "MIN": lambda stack: stack.amin(0),
    "MAX": lambda stack: stack.amax(0),
    "BAND": lambda stack: stack[0] & stack[1],
    "BOR": lambda stack: stack[0] | stack[1],
    "BXOR": lambda stack: stack[0] ^ stack[1],
}


def run_reductions(rank: int, world: int) -> None:
    """Each reduction for each dtype that has it."""
    with process_group():
        for dtype in DTYPES:
            for name, expected in OPS.items():
                if name.startswith("B") and dtype.is_floating_point:
                    continue
                tensor = values(rank, 33, dtype)
                dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
                stack = torch.stack([values(r, 33, dtype) for r in range(world)])
                exact = expected(stack.to(torch.int64))
                assert_same(tensor, exact.to(dtype))
        tensor = values(rank, 33)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert_same(tensor, total(world, 33) / world)
        tensor = values(rank, 33)
        dist.all_reduce(tensor, dist.ReduceOp.PREMUL_SUM(0.5))
        assert_same(tensor, total(world, 33) / 2)
        flags = torch.tensor([rank == 0, True, False])
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        assert flags.tolist() == [True, True, False]
        tensor = torch.complex(values(rank, 5), -values(rank, 5))
        dist.all_reduce(tensor)
        assert_same(tensor, torch.complex(total(world, 5), -total(world, 5)))


def test_reductions(rank_pool: Any) -> None:
    rank_pool(2).run(run_reductions)


MOVED = [*DTYPES, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.float8_e5m2]


def run_moves(rank: int, world: int) -> None:
    """Data of dtypes that the core does not compute with moves all the same."""
    with process_group():
        for dtype in MOVED:
            mine, root = values(rank, 9).to(dtype), values(0, 9).to(dtype)
            tensor = mine.clone()
            dist.broadcast(tensor, 0)
            assert torch.equal(tensor.view(torch.uint8), root.view(torch.uint8)), dtype
            outputs = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(outputs, mine)
            assert torch.equal(outputs[0].view(torch.uint8), root.view(torch.uint8)), dtype
            rows = torch.empty_like(outputs[0][:world])
            dist.all_to_all_single(rows, torch.cat([mine[:1]] * world))
            assert torch.equal(rows[:1].view(torch.uint8), root[:1].view(torch.uint8)), dtype


def test_any_dtype_moves(rank_pool: Any) -> None:
    rank_pool(2).run(run_moves)


def run_point_to_point(rank: int, world: int) -> None:
    """Tags, any source, non-blocking pairs, batches."""
    with process_group():
        right, left = (rank + 1) % world, (rank - 1) % world
        sends = [dist.isend(values(rank + 10 * tag, 100), right, tag=tag) for tag in range(3)]
        received = [torch.empty(100) for _ in range(3)]
        receives = [dist.irecv(received[tag], left, tag=tag) for tag in (2, 0, 1)]
        for work in sends + receives:
            work.wait()
        # receives[0] filled received[2], and so on: each by its tag
        assert_same(received, [values(left + 10 * tag, 100) for tag in range(3)])

        if rank == 0:
            senders = set()
            for _ in range(world - 1):
                tensor = torch.empty(3)
                sender = dist.recv(tensor)
                assert_same(tensor, values(sender, 3))
                senders.add(sender)
            assert senders == set(range(1, world))
        else:
            dist.send(values(rank, 3), 0)
        dist.barrier()  # rank 0 must not take what comes next for one of these

        output = torch.empty(70_000)
        batch = [
            dist.P2POp(dist.irecv, output, left),
            dist.P2POp(dist.isend, values(rank, 70_000), right),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert_same(output, values(left, 70_000))


@pytest.mark.parametrize("world", [2, 3])
def test_point_to_point(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(run_point_to_point)


def run_objects(rank: int, world: int) -> None:
    """Object collectives are built of several others."""
    with process_group():
        everybody: list[Any] = [None] * world
        dist.all_gather_object(everybody, {"rank": rank, "text": "x" * rank})
        assert everybody == [{"rank": r, "text": "x" * r} for r in range(world)]
        objects = ["a", 1.5] if rank == 0 else [None, None]
        dist.broadcast_object_list(objects, 0)
        assert objects == ["a", 1.5]
        gathered = [None] * world if rank == 0 else None
        dist.gather_object(rank, gathered, 0)
        assert gathered is None or gathered == list(range(world))
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [10 * r for r in range(world)] if rank == 0 else None, 0)
        assert mine == [10 * rank]


@pytest.mark.parametrize("world", [2, 3])
def test_objects(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(run_objects)
