"""all_reduce of sparse tensors, and DDP with sparse gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sdp_plugins.core import CollectiveMismatchError, SdpError
from tests.torch.jobs import assert_same, process_group

ROWS, COLUMNS = 50, 3


def entries(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's tensor: whole rows, some of them twice; as many as the rank, so rank 0 has none."""
    random = torch.Generator().manual_seed(rank)
    rows = torch.randint(ROWS, (1, 10 * rank), generator=random)
    values = torch.randn((10 * rank, COLUMNS), generator=random).to(dtype)
    return torch.sparse_coo_tensor(rows, values, (ROWS, COLUMNS), check_invariants=True)


def dense_sum(rank: int, dtype: torch.dtype) -> Tensor:
    tensor = entries(rank, dtype).coalesce().to_dense()
    dist.all_reduce(tensor)
    return tensor


def run_sums(rank: int, world: int) -> None:
    with process_group():
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
            for async_op in (False, True):
                tensor = entries(rank, dtype)
                work = dist.all_reduce(tensor, async_op=async_op)
                if work is not None:
                    assert work.get_future().wait() == [tensor]
                assert tensor.is_coalesced()
                assert not tensor.values().is_inference()
                tensor.values().mul_(1)
                assert_same(tensor.to_dense(), dense_sum(rank, dtype))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_sums_are_those_of_dense_tensors(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(run_sums)


def run_scalars(rank: int, world: int) -> None:
    """All dimensions sparse; among other operations in flight."""
    with process_group():
        works = [dist.all_reduce(torch.ones(100), async_op=True)]
        mine = torch.sparse_coo_tensor([[rank, 2], [0, 1]], [1.0, 2.0], (3, 2))
        works.append(dist.all_reduce(mine, async_op=True))
        works.append(dist.all_reduce(after := torch.ones(3), async_op=True))
        for work in works:
            work.wait()
        assert_same(mine.to_dense(), torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 4.0]]))
        assert_same(after, torch.full((3,), 2.0))


def test_all_dimensions_sparse(rank_pool: Any) -> None:
    rank_pool(2).run(run_scalars)


def run_shapes_that_differ(rank: int, world: int) -> None:
    with process_group():
        shape = (4, 2 + rank)
        tensor = torch.sparse_coo_tensor([[0]], torch.ones(1, shape[1]), shape)
        with pytest.raises(CollectiveMismatchError, match=rf"\(4, {2 + rank}\).*rank {1 - rank}"):
            dist.all_reduce(tensor)
        with pytest.raises(CollectiveMismatchError, match=r"float(32|64).*another"):
            dist.all_reduce(entries(1, torch.float64 if rank else torch.float32))
        with pytest.raises(CollectiveMismatchError):
            dist.all_reduce(tensor if rank else torch.eye(2).to_sparse()[0])


def test_shapes_that_differ_are_told(rank_pool: Any) -> None:
    rank_pool(2).run(run_shapes_that_differ)


def run_entries_that_cannot_be(rank: int, world: int) -> None:
    with process_group():
        if rank == 1:  # beyond the shape
            tensor = torch.sparse_coo_tensor([[7]], [1.0], (4,), check_invariants=False)
        else:
            tensor = torch.sparse_coo_tensor([[1]], [1.0], (4,))
        work = dist.all_reduce(tensor, async_op=True)
        for _ in range(2):
            with pytest.raises(SdpError, match="rank 1 sent invalid entries"):
                work.wait()
        assert isinstance(work.exception(), SdpError)
        assert not work.is_success()
        dist.all_reduce(dense := torch.ones(3))
        assert_same(dense, torch.full((3,), 2.0))


def test_entries_that_cannot_be_are_an_error_of_their_work(rank_pool: Any) -> None:
    rank_pool(2).run(run_entries_that_cannot_be)


def run_misuse(rank: int, world: int) -> None:
    with process_group():
        with pytest.raises(TypeError, match=r"torch.bool.*float32"):
            dist.all_reduce(torch.eye(2, dtype=torch.bool).to_sparse())
        with pytest.raises(ValueError, match=r"SUM only.*MAX.*to_dense"):
            dist.all_reduce(entries(1), dist.ReduceOp.MAX)
        with pytest.raises(ValueError, match=r"sparse_csr.*to_dense"):
            dist.all_reduce(torch.eye(2).to_sparse_csr())
        with pytest.raises(ValueError, match="on meta"):
            dist.all_reduce(torch.sparse_coo_tensor(size=(2, 2), device="meta"))
        dist.barrier()


def test_misuse(rank_pool: Any) -> None:
    rank_pool(2).run(run_misuse)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(ROWS, COLUMNS, sparse=True)
    return torch.nn.Sequential(embedding, torch.nn.Linear(COLUMNS, 2))


def loss(model: torch.nn.Module, rank: int, step: int) -> Tensor:
    result: Tensor = model(torch.arange(5) * (rank + 1) + step).square().sum()
    return result


def train(model: torch.nn.Module, ranks: list[int]) -> list[Tensor]:
    """Three steps on the mean of these ranks' losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (sum(loss(model, rank, step) for rank in ranks) / len(ranks)).backward()  # type: ignore[union-attr]
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def run_ddp(rank: int, world: int) -> None:
    with process_group():
        parallel = torch.nn.parallel.DistributedDataParallel(model())
        together = train(parallel, [rank])
        gradient = next(parallel.parameters()).grad
        assert gradient is not None
        assert gradient.coalesce().values().mul_(2).isfinite().all()
    alone = train(model(), list(range(world)))
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("world", [2, 3])
def test_ddp_with_sparse_gradients(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(run_ddp)
