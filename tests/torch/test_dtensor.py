"""DTensor and tensor parallelism compute what one process computes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    zeros,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.torch.jobs import assert_same, process_group
from tests.torch.sharded import FEATURES, Block, assert_close, batch, blocks, train, trained_alone

PLACEMENTS = [Replicate(), Shard(0), Shard(1)]


def run_redistribution(rank: int, world: int) -> None:
    """Of a matrix with fewer rows than ranks, and columns that they cannot share equally."""
    with process_group():
        mesh = init_device_mesh("cpu", (world,))
        matrix = torch.arange(14.0).reshape(2, 7)
        for source, target in product(PLACEMENTS, PLACEMENTS):
            tensor = distribute_tensor(matrix, mesh, [source])
            moved = tensor.redistribute(mesh, [target])
            assert moved.placements == (target,)
            assert_same(moved.full_tensor(), matrix)
        for target in PLACEMENTS:
            part = DTensor.from_local(matrix * (rank + 1), mesh, [Partial()], run_check=False)
            total = matrix * sum(range(1, world + 1))
            assert_same(part.redistribute(mesh, [target]).full_tensor(), total)


@pytest.mark.parametrize("world", [2, 3])
def test_redistribution(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(run_redistribution)


def run_arithmetic(rank: int, world: int) -> None:
    """On a mesh of two dimensions, whose groups are not contiguous."""
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        a, b = torch.randn(6, 8, generator=seed(1)), torch.randn(8, 4, generator=seed(2))
        left = distribute_tensor(a, mesh, [Shard(0), Shard(1)])
        right = distribute_tensor(b, mesh, [Replicate(), Shard(0)])
        torch.testing.assert_close((left @ right).full_tensor(), a @ b)
        torch.testing.assert_close(left.sum().full_tensor(), a.sum())
        torch.testing.assert_close(left.softmax(1).full_tensor(), a.softmax(1))
        assert_same(left.max().full_tensor(), a.max())
        local = zeros(6, 4, device_mesh=mesh, placements=[Shard(0), Shard(1)]).to_local()
        assert local.shape == (3, 2)


def seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def test_arithmetic(rank_pool: Any) -> None:
    rank_pool(4).run(run_arithmetic)


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE_PLAN = {
    "norm": SequenceParallel(sequence_dim=0),
    "up": ColwiseParallel(input_layouts=Shard(0)),
    "down": RowwiseParallel(output_layouts=Shard(0)),
}


class Sequence(Block):
    """Rows are split among ranks outside of the matrix products."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def run_tensor_parallel(rank: int, world: int) -> None:
    with process_group():
        mesh = init_device_mesh("cpu", (world,))
        torch.manual_seed(0)
        model, alone = Sequence(), Sequence()
        alone.load_state_dict(model.state_dict())
        prepare = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),)
        )
        parallelize_module(model, mesh, SEQUENCE_PLAN)
        parallelize_module(model, mesh, prepare)
        x = batch(0, 0)
        expected = alone(x)
        actual = model(x)
        torch.testing.assert_close(gathered(actual, mesh), expected)
        actual.sum().backward()
        expected.sum().backward()
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


def gathered(part: Tensor, mesh: Any) -> Tensor:
    return DTensor.from_local(part, mesh, [Shard(0)]).full_tensor()


@pytest.mark.parametrize("world", [2, 4])
def test_tensor_and_sequence_parallel(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(run_tensor_parallel)


def run_with_shards(rank: int, world: int) -> None:
    """FSDP over one dimension of the mesh, tensor parallelism over the other."""
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        model = blocks()
        for block in model:
            parallelize_module(block, mesh["model"], PLAN)
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        train(model, [mesh["data"].get_local_rank()])
        whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
        assert_close(whole, trained_alone(2))


def test_with_fully_shard(rank_pool: Any) -> None:
    rank_pool(4).run(run_with_shards)


def run_loss(rank: int, world: int) -> None:
    """A loss whose classes are split among ranks."""
    with process_group():
        mesh = init_device_mesh("cpu", (world,))
        logits, target = torch.randn(5, 8, generator=seed(1)), torch.arange(5)
        split = distribute_tensor(logits, mesh, [Shard(1)], src_data_rank=None).requires_grad_()
        with loss_parallel():
            loss = nn.functional.cross_entropy(split, target)
            loss.backward()
        logits.requires_grad_()
        expected = nn.functional.cross_entropy(logits, target)
        expected.backward()
        torch.testing.assert_close(loss.full_tensor(), expected)
        torch.testing.assert_close(split.grad.full_tensor(), logits.grad)


def test_loss_parallel(rank_pool: Any) -> None:
    rank_pool(2).run(run_loss)


def run_embedding(rank: int, world: int) -> None:
    with process_group():
        mesh = init_device_mesh("cpu", (world,))
        torch.manual_seed(0)
        alone, ids = nn.Embedding(10, FEATURES), torch.tensor([[1, 9, 3], [0, 5, 2]])
        expected = alone(ids).detach().clone()
        model = parallelize_module(alone, mesh, RowwiseParallel(input_layouts=Replicate()))
        assert_same(model(ids).detach(), expected)


@pytest.mark.parametrize("world", [2, 3])
def test_embeddings_by_rows(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(run_embedding)
