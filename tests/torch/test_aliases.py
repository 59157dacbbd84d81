"""Lists whose tensors share memory: each place gets what gloo gives it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.torch.jobs import assert_same, process_group


def row(rank: int, *values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32) + rank


def same_twice(rank: int, world: int) -> list[Tensor]:
    tensor = row(rank, 1)
    dist.all_reduce_coalesced([tensor, tensor])
    return [tensor]


def view_and_whole(rank: int, world: int) -> list[Tensor]:
    first, last = row(rank, 1, 10), row(rank, 1, 10)
    dist.all_reduce_coalesced([first, first[:1]])
    dist.all_reduce_coalesced([last[1:], last])
    return [first, last]


def interleaved(rank: int, world: int) -> list[Tensor]:
    tensor = row(rank, 1, 2, 3, 4)
    dist.all_reduce_coalesced([tensor[::2], tensor[1::2], tensor[:2]])
    return [tensor]


def coalescing_manager(rank: int, world: int) -> list[Tensor]:
    tensor = row(rank, 1)
    with dist._coalescing_manager():
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)
    return [tensor]


def asynchronous(rank: int, world: int) -> list[Tensor]:
    tensor = row(rank, 1, 2)
    dist.all_reduce_coalesced([tensor, tensor[1:]], async_op=True).wait()
    return [tensor]


def gathered_input(rank: int, world: int) -> list[Tensor]:
    """An output of the first tensor's is the second tensor."""
    inputs = [row(rank, 1), row(rank, 10)]
    lists = [[torch.zeros(1), torch.zeros(1)] for _ in range(world)]
    lists[0][0] = inputs[1]
    dist.all_gather_coalesced(lists, inputs)
    return [tensor for each in lists for tensor in each]


def gathered_once(rank: int, world: int) -> list[Tensor]:
    """All outputs are the same one: the last tensor of the last rank remains."""
    output = torch.zeros(1)
    dist.all_gather_coalesced([[output] * 2] * world, [row(rank, 1), row(rank, 10)])
    return [output]


def gathered_whole(rank: int, world: int) -> list[Tensor]:
    outputs = [row(rank, *[10.0] * world), torch.zeros(world)]
    inputs = [row(rank, 1), outputs[0][:1]]
    dist.group.WORLD.allgather_into_tensor_coalesced(outputs, inputs).wait()
    return outputs


def scattered(rank: int, world: int) -> list[Tensor]:
    whole, output = row(rank, *range(10, 10 + world)), torch.zeros(1)
    inputs = [row(rank, *range(1, 1 + world)), whole]
    dist.group.WORLD.reduce_scatter_tensor_coalesced([whole[:1], output], inputs).wait()
    return [whole, output]


CASES = [
    same_twice,
    view_and_whole,
    interleaved,
    coalescing_manager,
    asynchronous,
    gathered_input,
    gathered_once,
    gathered_whole,
    scattered,
]


def run_cases(rank: int, world: int) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch renames some of them
    results = {}
    for backend in ("smddp", "gloo"):  # smddp waits until its store has ended
        with process_group(backend):
            results[backend] = [case(rank, world) for case in CASES]
    for case, ours, gloos in zip(CASES, results["smddp"], results["gloo"], strict=True):
        try:
            assert_same(ours, gloos)
        except AssertionError as error:
            raise AssertionError(f"{case.__name__}: {ours}, and over gloo {gloos}") from error


@pytest.mark.parametrize("world", [2, 3])
def test_tensors_of_a_list_share_memory(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(run_cases)


def run_disjoint(rank: int, world: int) -> None:
    """Views of one buffer that do not overlap are not copied."""
    whole = row(rank, *range(6))
    pieces = [[whole[2:4]], [whole[:2]], [whole[4:]]]
    from sdp_plugins.torch.tensors import Outputs, share_memory

    assert not share_memory(pieces)
    assert Outputs(pieces).dense(whole[:2]).data_ptr() == whole.data_ptr()
    assert share_memory([*pieces, [whole[3:5]]])
    assert share_memory([[whole, whole[2:]], [torch.empty(0)]])  # in one operation, too
    assert not share_memory([[whole[:4]], [whole[4:], torch.empty(0)]])
    assert share_memory([[whole[:1], whole[1:6]], [whole[5:]]])


def test_views_that_do_not_overlap(rank_pool: Any) -> None:
    rank_pool(1).run(run_disjoint)


def refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def run_refused(rank: int, world: int) -> None:
    """Wrong lists are the same error on all ranks, before anything is sent."""
    with process_group() as group:
        mixed = [torch.ones(1), torch.ones(1, dtype=torch.float64)]
        refused(lambda: group.allreduce_coalesced(mixed), TypeError, "float32, torch.float64")
        inputs = [torch.ones(2), torch.ones(1)]
        lists = [[torch.zeros(2), torch.zeros(1)] for _ in range(world)]
        lists[1][0] = torch.zeros(3)
        call = lambda: dist.all_gather_coalesced(lists, inputs)  # noqa: E731
        refused(call, ValueError, r"rank 1 are of \[\(3,\), \(1,\)\]")
        wholes = [torch.zeros(2 * world), torch.zeros(world + 1)]
        gather = group.allgather_into_tensor_coalesced
        refused(lambda: gather(wholes, inputs), ValueError, "elements")
        assert_same(wholes[0], torch.zeros(2 * world))
        scatter = group.reduce_scatter_tensor_coalesced
        refused(lambda: scatter(inputs, wholes), ValueError, "elements")
        assert_same(inputs[0], torch.ones(2))
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == world


def test_wrong_lists_are_refused_everywhere(rank_pool: Any) -> None:
    rank_pool(2).run(run_refused)
