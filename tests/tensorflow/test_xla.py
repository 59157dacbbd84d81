"""Collectives in functions that XLA compiles (``jit_compile=True``), beside test_api.py."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.keras.conftest import first_ranks, needs_xla
from tests.tensorflow.test_api import run

pytestmark = [pytest.mark.versions, needs_xla]


@pytest.fixture
def pool(rank_pools: Any) -> Any:
    """`pool(n)`: n kept ranks with TensorFlow, whose fusion buffers are small."""
    small = {"SDP_FUSION_MB": "0.0010986328125"}  # 1152 bytes
    return lambda n: replace(first_ranks(rank_pools, "tensorflow", n), environment=small)


def test_compiled_ahead() -> None:
    command = [sys.executable, "-m", "sdp_plugins.tensorflow"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.stdout.splitlines() == ["all_reduce: compiled", "XLA: compiled"], done.stderr
    env = {**os.environ, "SDP_NATIVE_OPS": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.stdout == "all_reduce: not compiled: SDP_NATIVE_OPS is 0\n", done.stderr
    assert done.returncode == 1


def test_xla_makes_calls_of_it(pool: Any) -> None:
    for before, after in run(pool(2), "what_xla_made"):
        for program in (before, after):
            calls = [line for line in program.splitlines() if "sdp_all_reduce" in line]
            assert len(calls) == 2, program
            assert all("custom_call_has_side_effect=true" in line for line in calls), calls
            assert all("output_to_operand_aliasing" in line for line in calls), calls


def test_all_types_in_several_buffers(pool: Any) -> None:
    first, second = run(pool(2), "kinds")
    assert first == second
    assert first["xla"] == first["graph"]
    np.testing.assert_array_equal(first["graph"]["avg"][2], np.arange(130) % 7 + 0.75)


def test_a_rank_without_rows_has_zeros(pool: Any) -> None:
    assert run(pool(2), "without_rows") == [[[4.0] * 3, [3, 3]]] * 2


@pytest.mark.parametrize("world", [2, 3])
def test_one_order_on_all_ranks(pool: Any, world: int) -> None:
    ranks = run(pool(world), "in_order")
    assert all(other == ranks[0] for other in ranks[1:])
    mean = (world - 1) / 2
    parts = sum(n * (sum(range(n + 1)) + mean * (n + 1)) for n in range(20))
    for turn, (total, low, whole) in enumerate(ranks[0]):
        np.testing.assert_allclose(total, parts, rtol=1e-6)
        both = 2.0 if turn % 2 else 1.0
        np.testing.assert_allclose(low, both * (np.arange(2) + mean) + 3, rtol=1e-6)
        np.testing.assert_allclose(whole, np.arange(20) + mean, rtol=1e-6)


def test_a_rank_that_does_not_come(pool: Any) -> None:
    text, _ = run(pool(2), "dead")
    assert text.startswith("AbortedError"), text
    assert "rank 1 did not arrive in 1.5 s" in text


def test_what_xla_cannot_compile(pool: Any) -> None:
    for text in run(pool(2), "not_by_xla"):
        assert "all_gather cannot be compiled by XLA" in text


def test_without_xlas_kernels(pool: Any) -> None:
    for text in run(pool(2), "without_kernels"):
        assert text.startswith("[1.0, 1.0] ")
        assert "all_reduce cannot be compiled by XLA: " in text
        assert "farmhash.h is missing. Hint: leave jit_compile=True out" in text
