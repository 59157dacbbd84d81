"""Every line that orders streams or keeps memory is needed: without it, a probe fails."""

from __future__ import annotations

import pytest

from tests import simdev
from tests.conftest import Pools
from tests.torch.accelerator import TIERS
from tests.torch.accelerator_mutants import MUTANTS, Mutant, load
from tests.torch.probe import DEVICE_POOL, PROBES
from tests.torch.stream_probes import run_probe

PATIENCE_S = (0.05, 0.3, 1.0)  # longer and longer, for a busy machine
CASES = [
    pytest.param(mutant, tier, id=f"{mutant.module}-{index}-{tier}")
    for index, mutant in enumerate(MUTANTS)
    for tier in mutant.tiers
]


def run_mutant(rank: int, world: int, mutant: Mutant, tier: str, patience_s: float) -> str:
    """How a probe fails with a mutant; empty if it passes."""
    load(mutant)
    try:
        run_probe(rank, world, mutant.probe, tier, patience_s)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        load(None)
        simdev.reset()
    return ""


def is_caught(mutant: Mutant, tier: str, patience_s: float, pools: Pools) -> bool:
    """Whether a probe fails on one of two ranks, which then go on to the next mutant."""
    pool = pools.pool(2, DEVICE_POOL)
    return any(pool.run(run_mutant, mutant, tier, patience_s))


@pytest.mark.parametrize(("mutant", "tier"), CASES)
def test_mutant_is_caught(mutant: Mutant, tier: str, rank_pools: Pools) -> None:
    assert any(is_caught(mutant, tier, patience_s, rank_pools) for patience_s in PATIENCE_S)


@pytest.mark.parametrize("tier", TIERS)
def test_probes_pass_without_mutants(tier: str, rank_pools: Pools) -> None:
    """In the same processes, after all mutants."""
    pool = rank_pools.pool(2, DEVICE_POOL)
    for name in PROBES:
        pool.run(run_probe, name, tier, 0.05)
