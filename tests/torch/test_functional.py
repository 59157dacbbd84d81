"""Functional collectives, with autograd and in compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor

from tests.torch.jobs import assert_same, process_group, total, values


def run_eager(rank: int, world: int) -> None:
    with process_group() as group:
        mine = values(rank, 4)
        everyone = [values(r, 4) for r in range(world)]
        assert_same(wait(functional.all_reduce(mine, "sum", group)), total(world, 4))
        assert_same(mine, values(rank, 4))  # as the name says
        assert_same(wait(functional.all_reduce(mine, "max", group)), everyone[-1])
        assert_same(wait(functional.broadcast(mine, 1, group)), everyone[1])
        assert_same(wait(functional.all_gather_tensor(mine, 0, group)), torch.cat(everyone))
        columns = functional.all_gather_tensor(mine.view(2, 2), 1, group)
        assert_same(wait(columns), torch.cat([e.view(2, 2) for e in everyone], 1))
        repeated, summed = mine.repeat(world), total(world, 4)
        assert_same(wait(functional.reduce_scatter_tensor(repeated, "sum", 0, group)), summed)
        one, two = functional.all_reduce_coalesced([mine, mine + 1], "sum", group)
        assert_same(wait(two) - wait(one), torch.full((4,), float(world)))
        found = functional.all_gather_into_tensor_coalesced([mine, mine * 2], group)
        assert_same(wait(found[1]), torch.cat(everyone) * 2)
        found = functional.reduce_scatter_tensor_coalesced([repeated] * 2, "sum", [0, 0], group)
        assert_same(wait(found[1]), summed)
        sizes = [4] * world
        exchanged = functional.all_to_all_single(repeated, sizes, sizes, group)
        assert_same(wait(exchanged), torch.cat(everyone))
        shifted = functional.permute_tensor(mine, [(r + 1) % world for r in range(world)], group)
        assert_same(wait(shifted), everyone[rank - 1])


def run_mixed(rank: int, world: int) -> None:
    """Results of functional collectives, which stand for tensors, in the others."""
    with process_group() as group:
        mine = functional.all_reduce(torch.ones(3), "sum", group)
        assert type(mine) is not Tensor
        everyone = torch.empty(3 * world)
        dist.all_gather_into_tensor(everyone, mine)
        assert_same(everyone, torch.full((3 * world,), float(world)))
        mine = functional.all_reduce(torch.ones(3) * rank, "sum", group)
        dist.broadcast(mine, 0)
        dist.all_reduce(mine)
        assert_same(wait(mine), total(world, 1).repeat(3) * 0 + world * sum(range(world)))
        sent = functional.all_reduce(torch.ones(3), "sum", group)
        received = functional.all_reduce(torch.zeros(3), "sum", group)
        works = dist.isend(sent, (rank + 1) % world), dist.irecv(received, (rank - 1) % world)
        for work in works:
            assert work is not None
            work.wait()
        assert_same(wait(received), torch.full((3,), float(world)))


def test_results_are_taken_as_tensors(rank_pool: Any) -> None:
    rank_pool(2).run(run_mixed)


def wait(tensor: Tensor) -> Tensor:
    return functional.wait_tensor(tensor)


@pytest.mark.parametrize("world", [2, 3])
def test_eager(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(run_eager)


def run_autograd(rank: int, world: int) -> None:
    with process_group() as group:
        x = values(rank, 4).requires_grad_()
        weights = torch.arange(4.0 * world)
        gathered = functional.all_gather_tensor_autograd(x, 0, group)
        (gathered * weights).sum().backward()
        assert_same(x.grad, world * weights[4 * rank : 4 * rank + 4])
        y = values(rank, 4 * world).requires_grad_()
        sizes = [4] * world
        (functional.all_to_all_single_autograd(y, sizes, sizes, group) * weights).sum().backward()
        assert_same(y.grad, torch.cat([weights[4 * rank : 4 * rank + 4]] * world))
        z = values(rank, 4).requires_grad_()
        (differentiable.all_reduce(z, group=group) * (rank + 1)).sum().backward()
        assert_same(z.grad, torch.full((4,), world * (world + 1) / 2))


@pytest.mark.parametrize("world", [2, 3])
def test_autograd(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(run_autograd)


def step(x: Tensor) -> Tensor:
    """What user code does: collectives between computations."""
    summed = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
    gathered = functional.all_gather_tensor(summed + 1, 0, dist.group.WORLD)
    result: Tensor = functional.reduce_scatter_tensor(gathered.sin(), "sum", 0, dist.group.WORLD)
    return result + 1


def plain(x: Tensor) -> Tensor:
    """dist's own calls, which torch.compile rewrites."""
    y = x * 2
    dist.all_reduce(y)
    out = y.new_empty(len(y) * dist.get_world_size())
    dist.all_gather_into_tensor(out, y)
    return out + 1


def run_compiled(rank: int, world: int, backend: str) -> None:
    with process_group():
        for function in (step, plain):
            compiled = torch.compile(function, fullgraph=True, backend=backend)
            for seed in range(3):
                x = values(rank + seed, 8)
                torch.testing.assert_close(compiled(x), function(x))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled(rank_pool: Any, backend: str) -> None:
    rank_pool(2).run(run_compiled, backend, timeout_s=160)
