"""Gradients are averaged while the backward pass goes on."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from tests.keras.conftest import environment, first_ranks
from tests.keras.first_ranks import FirstRanks
from tests.keras.test_fit import assert_same
from tests.ranks import start_ranks

SMALL_BUFFERS = {"SDP_FUSION_MB": "1"}


def job(name: str) -> str:
    return f"from tests.keras.overlap_jobs import {name} as main"


def pool_of(rank_pools: Any, backend: str) -> FirstRanks:
    return replace(first_ranks(rank_pools, backend, 2), environment=SMALL_BUFFERS)


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_compiled_steps_overlap(rank_pools: Any, backend: str) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("what waits here takes the only thread")
    pool = pool_of(rank_pools, backend)
    assert pool.run(job("compiled_step_overlaps")) == [True, True]


def test_torch_overlaps(rank_pools: Any) -> None:
    """But not a step of one's own, which may have several backward passes; with the same result."""
    pool, values = pool_of(rank_pools, "torch"), []
    for own_step in (False, True):
        for overlapped, found in pool.run(job("torch_overlaps"), own_step):
            assert overlapped is not own_step
            values.append(found)
    for other in values[1:]:
        assert_same(other, values[0], 0.0, "")


def test_gradients_on_some_ranks_only_are_named(rank_pools: Any) -> None:
    for text in pool_of(rank_pools, "torch").run(job("on_some_ranks_only")):
        assert "model/seldom/bias' got a gradient on some ranks only" in text


def test_a_rank_that_dies_in_its_backward_pass_is_named() -> None:
    with start_ranks(2, job("dies_in_backward"), env=environment("torch") | SMALL_BUFFERS) as ranks:
        text = ranks[0].result()
    assert "PeerLostError: [rank 0 in group keras (ranks 0, 1)] all_reduce" in text
    assert "rank 1 ended while needed" in text
