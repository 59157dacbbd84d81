"""Tensor subclasses and dispatch modes see the operators of a call, as over gloo."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from tests.torch.jobs import assert_same, process_group


def two(rank: int, count: int = 2) -> TwoTensor:
    """A tensor that is two others."""
    return TwoTensor(torch.full((count,), rank + 1.0), torch.full((count,), 10.0 * (rank + 1)))


def is_two(tensor: Any, *values: float) -> None:
    assert type(tensor) is TwoTensor
    assert_same(tensor.a, torch.tensor(values, dtype=torch.float32))
    assert_same(tensor.b, 10 * torch.tensor(values, dtype=torch.float32))


def run_subclass(rank: int, world: int) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch renames some of them
    with process_group():
        for async_op in (False, True):

            def done(work: Any) -> None:
                if work is not None:
                    work.wait()

            tensor = two(rank)
            done(dist.all_reduce(tensor, async_op=async_op))
            is_two(tensor, 3, 3)
            tensor = two(rank)
            done(dist.broadcast(tensor, 1, async_op=async_op))
            is_two(tensor, 2, 2)
            outputs = [two(0), two(0)]
            done(dist.all_gather(outputs, two(rank), async_op=async_op))
            is_two(outputs[0], 1, 1)
            is_two(outputs[1], 2, 2)
            whole = two(0, 4)
            done(dist.all_gather_into_tensor(whole, two(rank), async_op=async_op))
            is_two(whole, 1, 1, 2, 2)
            part = two(0, 1)
            done(dist.reduce_scatter_tensor(part, two(rank), async_op=async_op))
            is_two(part, 3)
            output = two(0)
            done(dist.all_to_all_single(output, two(rank), async_op=async_op))
            is_two(output, 1, 2)
            done(dist.gather(two(rank), outputs if rank == 0 else None, async_op=async_op))
            done(dist.scatter(output, [two(4), two(5)] if rank == 0 else None, async_op=async_op))
            is_two(output, 5 + rank, 5 + rank)
            done(dist.reduce(output, 0, async_op=async_op))
            is_two(output, *[11 if rank == 0 else 6] * 2)
        tensors = [two(rank), two(rank, 1)]
        dist.all_reduce_coalesced(tensors)
        is_two(tensors[1], 3)
        tensor = two(rank)
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        is_two(tensor, 1, 1)


def test_a_subclass_reaches_its_own_dispatch(rank_pool: Any) -> None:
    rank_pool(2).run(run_subclass)


class Stored(Tensor):
    """Elements in another tensor, of another type and shape than this one tells."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Stored:
        made = Tensor._make_wrapper_subclass(cls, (99,), dtype=torch.bfloat16)
        assert isinstance(made, cls)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = tree_map_only(cls, lambda stored: stored.inner, (args, kwargs or {}))
        return operator(*given[0], **given[1])


def run_stored(rank: int, world: int) -> None:
    mine, whole = torch.full((2,), rank + 1.0), torch.tensor([1.0, 1.0, 2.0, 2.0])
    with process_group() as group:
        output = torch.zeros(4)
        dist.all_gather_into_tensor(output, Stored(mine))
        assert_same(output, whole)
        outputs = [torch.zeros(4), torch.zeros(4)]
        inputs = [Stored(mine), mine]
        group.allgather_into_tensor_coalesced(outputs, inputs).wait()
        assert_same(torch.stack(outputs), whole.expand(2, 4))
        lists = [[torch.zeros(2)], [torch.zeros(2)]]
        group.allgather_coalesced(lists, [Stored(mine)]).wait()
        assert_same(torch.cat([part for (part,) in lists]), whole)
        group.reduce_scatter_tensor_coalesced(
            [mine[:1], mine[1:]], [Stored(mine.clone()), mine.clone()]
        ).wait()
        assert_same(mine, torch.full((2,), 3.0))
        group.alltoall_base(output[:2], Stored(torch.tensor([1.0, 2.0])), [], []).wait()
        assert_same(output[:2], torch.full((2,), rank + 1.0))


def test_what_a_subclass_tells_of_itself_is_not_what_is_sent(rank_pool: Any) -> None:
    rank_pool(2).run(run_stored)


def run_mode(rank: int, world: int) -> None:
    with process_group() as group, CommDebugMode() as mode:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.broadcast(tensor, 0)
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            group.allreduce([tensor], op=dist.ReduceOp.MAX).wait()
        counts = {str(name): count for name, count in mode.get_comm_counts().items()}
        assert counts == {"c10d.allreduce_": 3, "c10d.broadcast_": 1}
        assert_same(tensor, torch.full((2,), 4.0))


def test_a_mode_sees_calls(rank_pool: Any) -> None:
    rank_pool(2).run(run_mode)


class Plain(Tensor):
    """A subclass without a dispatch of its own is just memory."""


def run_plain(rank: int, world: int) -> None:
    with process_group():
        tensor = torch.ones(2).as_subclass(Plain)
        dist.all_reduce(tensor)
        assert_same(tensor.as_subclass(Tensor), torch.full((2,), 2.0))
        with FakeTensorMode():
            fake = torch.ones(2)
        with pytest.raises(ValueError, match="no memory"):
            dist.all_reduce(fake)


def test_other_subclasses(rank_pool: Any) -> None:
    rank_pool(2).run(run_plain)
