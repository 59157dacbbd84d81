"""Optimizers, averages and metrics of torch.distributed and its friends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.torch.jobs import assert_same, process_group
from tests.torch.sharded import assert_close, blocks, loss_of, train, trained_alone


def run_zero(rank: int, world: int, options: dict[str, Any]) -> None:
    with process_group():
        model = DistributedDataParallel(blocks())
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, lr=0.01, **options
        )
        train(model, [rank], optimizer)
        assert_close(dict(model.module.state_dict()), trained_alone(world))
        optimizer.consolidate_state_dict(to=0)
        if rank == 0:
            assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("options", [{}, {"parameters_as_bucket_view": True}], ids=str)
def test_zero_redundancy(rank_pool: Any, world: int, options: dict[str, Any]) -> None:
    rank_pool(world).run(run_zero, options)


def run_join(rank: int, world: int) -> None:
    """DDP and ZeRO, where one rank has more batches than the other."""
    with process_group():
        model = DistributedDataParallel(blocks())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
        steps = 0
        with Join([model, optimizer]):
            for step in range(3 + 2 * rank):
                optimizer.zero_grad()
                loss_of(model, [rank], step).backward()
                optimizer.step()
                steps += 1
        assert steps == 3 + 2 * rank
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        everyone = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everyone, mine)
        assert_same(everyone, [everyone[0]] * world)


def test_join_with_uneven_inputs(rank_pool: Any) -> None:
    rank_pool(2).run(run_join)


def run_local_sgd(rank: int, world: int) -> None:
    with process_group():
        model = blocks()
        optimizer = PostLocalSGDOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            PeriodicModelAverager(period=3, warmup_steps=0),
        )
        train(model, [rank], optimizer)
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        least, most = mine.clone(), mine.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        assert_same(least, most)


def test_local_sgd(rank_pool: Any) -> None:
    rank_pool(2).run(run_local_sgd)


def run_metrics(rank: int, world: int) -> None:
    """Ranks have different numbers of rows, so that what is gathered differs in size."""
    import torchmetrics  # takes seconds, and other tests' ranks import this module

    with process_group():
        rows = [torch.arange(float(3 + r)) + r for r in range(world)]
        mean, kept = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
        accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=4, average="micro")
        mean.update(rows[rank])
        kept.update(rows[rank])
        accuracy.update(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, rank]))
        torch.testing.assert_close(mean.compute(), torch.cat(rows).mean())
        assert_same(kept.compute(), torch.cat(rows))
        right = 3 * world + sum(r == 3 for r in range(world))
        torch.testing.assert_close(accuracy.compute(), torch.tensor(right / (4 * world)))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_torchmetrics(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(run_metrics)
