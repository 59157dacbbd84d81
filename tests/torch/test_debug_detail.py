"""TORCH_DISTRIBUTED_DEBUG=DETAIL, and sequence numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp_plugins.core import CollectiveMismatchError
from tests.ranks import run_ranks
from tests.torch.jobs import assert_same, process_group

DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


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
