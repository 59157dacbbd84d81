"""All forms of c10d's arguments, tensors that are not dense, and misuse."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torch.jobs import assert_same, process_group, total, values

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
MINUTE = timedelta(minutes=1)


def run_reductions(rank: int, world: int) -> None:
    """What torch's own code and tests call on the object itself."""
    with process_group() as group:
        most = values(world - 1, 4)
        for arguments in ([], [SUM], [dist.AllreduceOptions()], [SUM, MINUTE], [None, MINUTE]):
            for tensors in (values(rank, 4), [values(rank, 4)]):
                work = group.allreduce(tensors, *arguments)
                assert work.wait()
                assert_same(work.result(), [total(world, 4)])
        tensor = values(rank, 4)
        group.allreduce(tensor, MAX).wait()
        assert_same(tensor, most)
        tensor = values(rank, 4)
        group.allreduce(tensor, op=MAX).wait(MINUTE)
        assert_same(tensor, most)
        tensor = values(rank, 4)
        group.reduce(tensor, 0, MAX).wait()
        assert_same(tensor, most if rank == 0 else values(rank, 4))
        group.reduce_scatter(tensor, [values(rank, 4)] * world, SUM).wait()
        assert_same(tensor, total(world, 4))
        group._reduce_scatter_base(tensor, values(rank, 4 * world)).wait()


def run_copies(rank: int, world: int) -> None:
    with process_group() as group:
        for arguments in ([1], [1, MINUTE], [root_options(dist.BroadcastOptions(), 1)]):
            tensor = values(rank, 4)
            group.broadcast(tensor, *arguments).wait()
            assert_same(tensor, values(1, 4))
        tensor = values(rank, 4)
        group.broadcast([tensor], root=1).wait()
        assert_same(tensor, values(1, 4))

        outputs = [torch.empty(4) for _ in range(world)]
        everything = [values(r, 4) for r in range(world)]
        group.allgather(outputs, values(rank, 4)).wait()
        assert_same(outputs, everything)
        group.allgather([outputs], [values(rank, 4)], MINUTE).wait()
        assert_same(outputs, everything)
        group._allgather_base(flat := torch.empty(world * 4), values(rank, 4)).wait()
        assert_same(flat, torch.cat(everything))

        group.gather(outputs, values(rank, 4), 0).wait()
        group.scatter(tensor, everything, 0).wait()
        assert_same(tensor, values(rank, 4))
        group.alltoall_base(flat, flat.clone(), [], []).wait()
        group.alltoall(outputs, everything).wait()
        assert_same(outputs, [values(rank, 4)] * world)


def run_barriers_and_messages(rank: int, world: int) -> None:
    with process_group() as group:
        group.barrier().wait()
        group.barrier(MINUTE).wait()
        group.barrier(timeout=MINUTE).wait()
        group.barrier(dist.BarrierOptions()).wait()
        group.monitored_barrier(MINUTE, wait_all_ranks=True)
        if rank == 0:
            group.send([values(0, 3)], 1, 7).wait()
        elif rank == 1:
            received = torch.empty(3)
            work = group.recv_anysource([received], 7)
            work.wait()
            assert work._source_rank() == work.source_rank() == 0
            assert_same(received, values(0, 3))
        dist.barrier()


def root_options(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


@pytest.mark.parametrize("run", [run_reductions, run_copies, run_barriers_and_messages])
def test_positional_forms(rank_pool: Any, run: Callable[[int, int], None]) -> None:
    rank_pool(2).run(run)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in another order in memory."""
    result = torch.empty(tensor.shape[::-1], dtype=tensor.dtype).t()
    assert not result.is_contiguous()
    return result.copy_(tensor)


def run_not_dense(rank: int, world: int, async_op: bool) -> None:
    def done(work: Any) -> None:
        if work is not None:
            work.get_future().wait()

    def data(r: int) -> torch.Tensor:
        return values(r, 12).view(4, 3)

    with process_group():
        everything = [data(r) for r in range(world)]
        tensor = transposed(data(rank))
        done(dist.all_reduce(tensor, async_op=async_op))
        assert_same(tensor, total(world, 12).view(4, 3))
        strided = torch.zeros(24)[::2]
        strided.copy_(values(rank, 12))
        done(dist.broadcast(strided, 1, async_op=async_op))
        assert_same(strided, values(1, 12))
        outputs = [transposed(torch.zeros(4, 3)) for _ in range(world)]
        done(dist.all_gather(outputs, transposed(data(rank)), async_op=async_op))
        assert_same(outputs, everything)
        table = transposed(torch.zeros(4 * world, 3))
        done(dist.all_gather_into_tensor(table, transposed(data(rank)), async_op=async_op))
        assert_same(table, torch.cat(everything))
        lists = outputs if rank == 0 else None
        done(dist.gather(transposed(data(rank)), lists, 0, async_op=async_op))
        output = transposed(torch.zeros(4, 3))
        done(dist.scatter(output, outputs if rank == 0 else None, 0, async_op=async_op))
        assert_same(output, data(rank))
        done(dist.reduce(output, 0, async_op=async_op))
        assert_same(output, total(world, 12).view(4, 3) if rank == 0 else data(rank))
        done(dist.reduce_scatter(output, [transposed(d) for d in everything], async_op=async_op))
        assert_same(output, world * data(rank))
        done(dist.all_to_all(outputs, [transposed(data(rank))] * world, async_op=async_op))
        assert_same(outputs, everything)
        done(dist.all_to_all_single(table, transposed(torch.cat(everything)), async_op=async_op))
        assert_same(table, torch.cat([data(rank)] * world))


def run_other_views(rank: int, world: int) -> None:
    with process_group():
        data = transposed(values(rank, 12).view(4, 3))
        if rank == 0:
            dist.send(data, 1)
        else:
            received = transposed(torch.zeros(4, 3))
            dist.recv(received, 0)
            assert_same(received, values(0, 12).view(4, 3))
        parameter = torch.nn.Parameter(data)  # a leaf that needs a gradient
        dist.all_reduce(parameter)
        assert_same(parameter.detach(), total(world, 12).view(4, 3))
        imaginary = torch.complex(values(rank, 4), values(rank, 4)).conj().imag
        assert imaginary.is_neg()
        dist.all_reduce(imaginary)
        assert_same(imaginary.resolve_neg(), -total(world, 4))


@pytest.mark.parametrize("async_op", [False, True])
def test_tensors_that_are_not_dense(rank_pool: Any, async_op: bool) -> None:
    rank_pool(2).run(run_not_dense, async_op)


def test_other_views(rank_pool: Any) -> None:
    rank_pool(2).run(run_other_views)


def reduce_expanded(rank: int, world: int) -> list[Any]:
    with process_group():
        wide = torch.arange(3.0).add(rank).unsqueeze(1).expand(3, 2)
        dist.all_reduce(wide)
        one = torch.full((1,), rank + 1.0).expand(3)
        dist.broadcast(one, 1)
        parts = [torch.zeros(1).expand(2) for _ in range(world)]
        dist.all_gather(parts, torch.full((2,), rank + 5.0))
        return [wide.tolist(), one.tolist(), [part.tolist() for part in parts]]


def test_expanded_outputs(rank_pool: Any) -> None:
    """As over gloo: what lies in one place of memory is written once."""
    pairs = [[[1.0, 1.0], [3.0, 3.0], [5.0, 5.0]], [2.0] * 3, [[5.0, 5.0], [6.0, 6.0]]]
    assert rank_pool(2).run(reduce_expanded) == [pairs, pairs]


def run_misuse(rank: int, world: int) -> None:
    """Each raises at once, on one rank alone, and the group goes on."""
    with process_group() as group:
        ones = torch.ones(4)
        wrong: list[tuple[type[Exception], str, Any]] = [
            (ValueError, r"sparse_coo.*to_dense", lambda: dist.broadcast(ones.to_sparse(), 0)),
            (ValueError, r"on meta.*cpu", lambda: dist.all_reduce(torch.ones(3, device="meta"))),
            (ValueError, r"on meta", lambda: dist.broadcast(torch.ones(3, device="meta"), 0)),
            (ValueError, r"no memory", lambda: dist.all_reduce(freed())),
            (TypeError, r"float8.*float32", lambda: dist.all_reduce(ones.to(torch.float8_e5m2))),
            (TypeError, r"uint16", lambda: dist.all_reduce(ones.to(torch.uint16))),
            (ValueError, r"one tensor", lambda: group.allreduce([ones, ones])),
            (ValueError, r"one tensor", lambda: group.allreduce([])),
            (TypeError, r"torch.Tensor", lambda: group.allreduce(["text"])),
            (ValueError, r"PREMUL_SUM\(0.5\)", lambda: group.allreduce(ones, premul_without())),
            (ValueError, r"root|rank", lambda: group.broadcast(ones, 5)),
            (ValueError, r"elements", lambda: dist.all_gather_into_tensor(torch.ones(5), ones)),
            (ValueError, r"elements", lambda: dist.reduce_scatter_tensor(ones, torch.ones(9))),
            (ValueError, r"2 tensors", lambda: dist.reduce_scatter(ones, [ones, ones[1:], ones])),
            (ValueError, r"2 tensors", lambda: dist.reduce_scatter(ones, [ones[1:], ones])),
            (TypeError, r"dtype", lambda: group.reduce_scatter(ones, [ones[1:], ones.int()])),
            (TypeError, r"dtype", lambda: group.allgather([ones.int()] * world, ones)),
            (
                ValueError,
                r"all_gather needs 8 elements \(2 ranks x 4\), got 5\. Hint: ",
                lambda: group.allgather_into_tensor_coalesced(
                    [torch.ones(8), torch.ones(5)], [ones, ones]
                ),
            ),
            (
                ValueError,
                r"cannot divide 3 rows of the output among 2 ranks",
                lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
            ),
            (
                ValueError,
                r"input_split_sizes \[1, 1\] do not add up to 4 rows\. Hint: ",
                lambda: dist.all_to_all_single(ones, ones.clone(), [2, 2], [1, 1]),
            ),
            (ValueError, r"rank", lambda: group.send([ones], 9, 0)),
        ]
        for error, text, call in wrong if rank == 0 else []:
            with pytest.raises(error, match=text):
                call()
        tensor = values(rank, 5)
        dist.all_reduce(tensor)
        assert_same(tensor, total(world, 5))
    with pytest.raises(RuntimeError, match="closed"):
        group.allreduce(ones)


def freed() -> torch.Tensor:
    tensor = torch.ones(10)
    tensor.untyped_storage().resize_(0)
    return tensor


def premul_without() -> Any:
    return dist.ReduceOp.PREMUL_SUM


def test_misuse_raises_before_anything_is_sent(rank_pool: Any) -> None:
    rank_pool(2).run(run_misuse)


def run_options(rank: int, world: int) -> None:
    with pytest.raises(TypeError, match="pg_options"):
        dist.init_process_group("smddp", pg_options=object())


def test_options_of_other_backends(rank_pool: Any) -> None:
    rank_pool(1).run(run_options)
