"""DDP on the simulated accelerator, with its options: bit by bit what it is on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from tests.conftest import Pools
from tests.torch import models
from tests.torch.accelerator import TIERS, device_group
from tests.torch.probe import DEVICE_POOL
from tests.torch.test_ddp import CASES, Case


def without_error_feedback(model: Any, group: Any) -> None:
    """PowerSGD's memory of errors crosses streams without a record, as it does over NCCL."""
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, use_error_feedback=False
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


ON_DEVICES = {
    **{name: case for name, case in CASES.items() if "PowerSGD" not in name},
    "PowerSGD": Case(setup=without_error_feedback),
}
del ON_DEVICES["delay_all_reduce"]  # torch delays gradients on CPUs only
NOT_BITWISE = {"mixed dtypes"}  # the simulated device multiplies bfloat16 otherwise


def run_cases(rank: int, world: int, tier: str) -> None:
    with device_group(tier):
        for name, case in ON_DEVICES.items():
            results = []
            for device in ("cpu", "simdev"):
                model = models.wrap(case.kind, None, device, **case.options)
                case.setup(model, dist.group.WORLD)
                torch.manual_seed(3)  # PowerSGD draws random numbers
                case.train(model, rank)
                results.append([tensor.cpu() for tensor in models.state(model)])
                del model
            allowed = (
                {"rtol": 0.01, "atol": 0.001} if name in NOT_BITWISE else {"rtol": 0, "atol": 0}
            )
            torch.testing.assert_close(
                results[1], results[0], **allowed, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("tier", TIERS)
def test_like_cpus(tier: str, rank_pools: Pools) -> None:
    rank_pools.pool(2, DEVICE_POOL).run(run_cases, tier)
