"""Pipeline parallelism: stages that send activations and gradients to each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from tests.torch.jobs import process_group
from tests.torch.sharded import FEATURES, blocks

ROWS, MICROBATCHES = 8, 4


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, target)


def run_pipeline(rank: int, world: int, kind: Any) -> None:
    with process_group():
        model, alone = blocks(world), blocks(world)
        x, target = torch.randn(2, ROWS, FEATURES, generator=torch.Generator().manual_seed(1))
        stage = PipelineStage(model[rank], rank, world, torch.device("cpu"))
        schedule = kind(stage, MICROBATCHES, loss_fn=loss)
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target if rank == world - 1 else None)
        loss(alone(x), target).backward()
        for mine, theirs in zip(model[rank].parameters(), alone[rank].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_pipeline(rank_pool: Any, kind: Any, world: int) -> None:
    rank_pool(world).run(run_pipeline, kind)
