"""TORCH_DISTRIBUTED_DEBUG=DETAIL, and sequence numbers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp_plugins.core import CollectiveMismatchError
from tests.ranks import run_ranks
from tests.torch.jobs import assert_same, process_group

DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


class Kept(logging.Handler):
    """Lines of a log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    """What is logged in the block."""
    kept, log = Kept(), logging.getLogger("sdp_plugins.torch.detail")
    log.addHandler(kept)
    log.setLevel(logging.INFO)
    yield kept.lines


def run_calls(rank: int, world: int) -> list[str]:
    with logged() as lines, process_group():
        dist.all_reduce(torch.ones(3, 2))
        dist.all_gather_into_tensor(torch.empty(4, dtype=torch.int8), torch.ones(2).to(torch.int8))
        dist.barrier()
        with pytest.raises(CollectiveMismatchError, match="#4"):
            dist.all_reduce(torch.ones(3 + rank))
    return lines


def test_detail_logs_calls() -> None:
    for rank, lines in enumerate(run_ranks(2, run_calls, env=DETAIL)):
        head = f"[rank {rank}/2]"
        assert lines == [
            f"{head} all_reduce #1 float32[3, 2]",
            f"{head} all_gather #2 int8[2]",
            f"{head} barrier #3",
            f"{head} all_reduce #4 float32[{3 + rank}]",
        ]


def run_all_kinds(rank: int, world: int) -> list[str]:
    with logged() as lines, process_group() as group:
        with dist._coalescing_manager():
            dist.all_reduce(torch.ones(2))
            dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.eye(2).to_sparse())
        group.monitored_barrier()
        if rank == 0:
            dist.send(torch.ones(4), 1, tag=7)
        else:
            dist.recv(torch.ones(4), tag=7)
        future = dist.all_reduce(torch.ones(5), async_op=True).get_future()
        future.then(lambda _: dist.all_reduce(torch.ones(6))).wait()
    return lines


def test_every_operation_of_a_call_is_logged_as_errors_number_it() -> None:
    for rank, lines in enumerate(run_ranks(2, run_all_kinds, env=DETAIL)):
        head = f"[rank {rank}/2]"
        assert lines == [
            f"{head} all_reduce #1 float32[2]",
            f"{head} all_reduce #2 float32[3]",
            *(f"{head} sparse_all_reduce #{number} float32[2, 2]" for number in (3, 4, 5)),
            f"{head} monitored_barrier #6",
            f"{head} " + ("recv from any rank" if rank else "send to rank 1") + " tag 7 float32[4]",
            f"{head} all_reduce #7 float32[5]",
            f"[rank {rank} in group default, callbacks (ranks 0, 1)] all_reduce #1 float32[6]",
        ]


def run_shapes(rank: int, world: int) -> list[str]:
    """Ranks differ in shapes and nothing else; nothing has moved, and the group goes on."""
    tensor = torch.ones(2 + rank, 3 - rank)
    calls: list[Any] = [
        lambda: dist.all_reduce(tensor),
        lambda: dist.broadcast(tensor, 0),
        lambda: dist.reduce(tensor, 0),
        lambda: dist.all_gather([torch.empty_like(tensor)] * 2, tensor),
        lambda: dist.all_reduce(tensor, async_op=True),
    ]
    messages = []
    with process_group():
        for call in calls:
            with pytest.raises(CollectiveMismatchError) as error:
                call()
            messages.append(str(error.value))
            assert error.value.ranks == (1 - rank,)
            assert_same(tensor, torch.ones_like(tensor))
        uneven = [torch.empty(1), torch.empty(2)]
        dist.all_gather(uneven, torch.ones(1 + rank))
        dist.all_reduce_coalesced([tensor, tensor])
    return messages


def test_detail_compares_shapes() -> None:
    for rank, messages in enumerate(run_ranks(2, run_shapes, env=DETAIL)):
        shapes = [(2, 3), (3, 2)]
        assert [message.partition(". Hint")[0] for message in messages] == [
            f"[rank {rank}/2] {name} #1: shapes differ: {shapes[rank]} here, {shapes[1 - rank]} "
            f"on rank {1 - rank}"
            for name in ("all_reduce", "broadcast", "reduce", "all_gather", "all_reduce")
        ]


def run_other_shapes(rank: int, world: int) -> None:
    with process_group():
        tensor = torch.ones(2 + rank, 3 - rank)
        dist.all_reduce(tensor)
        assert_same(tensor, 2 * torch.ones(2 + rank, 3 - rank))


def test_shapes_may_differ_without(rank_pool: Any) -> None:
    rank_pool(2).run(run_other_shapes)


def test_nothing_is_logged_without() -> None:
    assert run_ranks(2, run_calls) == [[], []]


def run_numbers(rank: int, world: int) -> None:
    with process_group() as group:
        assert group._get_sequence_number_for_group() == 0
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        assert group._get_sequence_number_for_group() == 2
        other = dist.new_group()
        assert other._get_sequence_number_for_group() == 0
        assert group._get_sequence_number_for_group() == 2


def test_sequence_numbers(rank_pool: Any) -> None:
    rank_pool(2).run(run_numbers)
