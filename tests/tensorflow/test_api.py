"""SMDDP's TensorFlow API: every name, eagerly and in graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.keras.first_ranks import FirstRanks

WAYS = ("eager", "graph")
pytestmark = pytest.mark.versions


def run(pool: FirstRanks, name: str, *args: Any) -> list[Any]:
    return pool.run(f"from tests.tensorflow.jobs import {name} as main", *args)


def test_names_of_smddp(ranks: Any) -> None:
    (found,) = run(ranks(1), "names")
    assert found == []


def test_places(ranks: Any) -> None:
    assert run(ranks(2), "places") == [(0, 2, 0, 2), (1, 2, 1, 2)]


@pytest.mark.parametrize("way", WAYS)
def test_reductions(ranks: Any, way: str) -> None:
    for found in run(ranks(2), "reductions", way):
        base = np.arange(5)
        expected = {
            "average": base + 0.5,
            "by name": base + 0.5,
            "sum": 2 * base + 1,
            "max": base + 1,
            "min": np.array(0),
            "half": base + 0.5,
            "root": base + 1,
            "same": 0 * base,
        }
        assert sorted(found) == sorted(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_training_equals_one_rank(ranks: Any, way: str) -> None:
    (alone,) = run(ranks(1), "training", way)
    first, second = run(ranks(2), "training", way)
    for one, other, single in zip(first, second, alone, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, single, rtol=1e-5, atol=1e-6)


def test_first_version(ranks: Any) -> None:
    first, second = run(ranks(2), "first_version")
    assert first == second
    # The averaged loss of `w` has its least at 4.5; of `v` the slope is 1.5.
    np.testing.assert_allclose(first, [4.5 - 3.5 / 8, 5 - 3 * 0.25 * 1.5], rtol=1e-6)


def test_keras_in_horovods_way(ranks: Any) -> None:
    first, second = run(ranks(2), "with_keras")
    assert first == second
    assert first["optimizer"] == "Adam"


def test_worker_comm(ranks: Any) -> None:
    first, second = run(ranks(2), "comm")
    everyone = [{"rank": 0}, {"rank": 1}]
    assert first == [0, 2, everyone, None, 1]
    assert second == [1, 2, everyone, ["", "x"], 1]


def test_mistakes(ranks: Any) -> None:
    for texts in run(ranks(2), "mistakes"):
        before, device, op, kind, size, index, nothing = texts
        assert before == "RuntimeError: this needs a job. Hint: call init() before."
        assert "device_dense is not supported" in device
        assert "op must be ReduceOp.AVERAGE" in op
        assert kind.startswith("TypeError: object is no optimizer")
        assert "a multiple of 128 bytes" in size
        assert "there is no tensor 3 of 3" in index
        assert "give the gradient" in nothing


@pytest.mark.parametrize("way", WAYS)
def test_a_mismatch_is_named(ranks: Any, way: str) -> None:
    for text in run(ranks(2), "other_sizes", way):
        assert "ranks disagree" in text
        assert "float32[3]" in text
        assert "float32[4]" in text


def test_optimizers_of_keras_by_all_their_names(ranks: Any) -> None:
    assert run(ranks(2), "optimizers_of_keras") == [[[-1.5, -3.0]] * 4] * 2


SMALL_BUFFERS = {"SDP_FUSION_MB": "0.0010986328125"}  # 1152 bytes


def test_all_types_in_several_buffers(ranks: Any) -> None:
    first, second = run(replace(ranks(2), environment=SMALL_BUFFERS), "kinds")
    assert first == second
    assert first["eager"] == first["graph"]
    np.testing.assert_array_equal(first["graph"]["avg"][2], np.arange(130) % 7 + 0.75)


def test_a_rank_without_rows_has_zeros(ranks: Any) -> None:
    assert run(ranks(2), "without_rows") == [[[4.0] * 3, [3, 3]]] * 2


@pytest.mark.parametrize("world", [2, 3])
def test_one_order_on_all_ranks(ranks: Any, world: int) -> None:
    found = run(ranks(world), "in_order")
    assert all(other == found[0] for other in found[1:])
    mean = (world - 1) / 2
    parts = sum(n * (sum(range(n + 1)) + mean * (n + 1)) for n in range(20))
    for turn, (total, low, whole) in enumerate(found[0]):
        np.testing.assert_allclose(total, parts, rtol=1e-6)
        both = 2.0 if turn % 2 else 1.0
        np.testing.assert_allclose(low, both * (np.arange(2) + mean) + 3, rtol=1e-6)
        np.testing.assert_allclose(whole, np.arange(20) + mean, rtol=1e-6)


def test_xla_is_refused(ranks: Any) -> None:
    for text in run(ranks(2), "by_xla"):
        assert "SdpAllReduce" in text


def test_compiled_ahead() -> None:
    command = [sys.executable, "-m", "sdp_plugins.tensorflow"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout == "all_reduce: compiled\n", done.stderr
    env = {**os.environ, "SDP_NATIVE_OPS": "0"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, env=env
    )
    assert done.stdout == "all_reduce: not compiled: SDP_NATIVE_OPS is 0\n", done.stderr
    assert done.returncode == 1
