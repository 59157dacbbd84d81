"""The TensorFlow strategy: loops of one's own, eagerly and in graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.keras.conftest import environment
from tests.keras.first_ranks import FirstRanks
from tests.ranks import start_ranks

JOBS = "from tests.tensorflow.strategy_jobs import {} as main"
LIMIT_S = 280.0  # of a case: Keras takes its time
modes = pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])


pytestmark = pytest.mark.versions


def run(pool: FirstRanks, name: str, *args: Any) -> list[Any]:
    return pool.run(JOBS.format(name), *args, timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("world", "in_graph"),
    [
        pytest.param(2, False, id="eager-2"),
        pytest.param(2, True, id="graph-2"),
        pytest.param(3, True, id="graph-3"),
    ],
)
def test_training_equals_one_rank(ranks: Any, in_graph: bool, world: int) -> None:
    """With an embedding's sparse gradients, and BatchNormalization over all ranks' rows."""
    (alone,) = run(ranks(1), "training", in_graph)
    first, *others = run(ranks(world), "training", in_graph)
    assert alone["iterations"] == first["iterations"] == 8
    for other in others:
        assert other["losses"] == first["losses"]
        assert other["metric"] == first["metric"]
        for one, two in zip(first["weights"], other["weights"], strict=True):
            np.testing.assert_array_equal(one, two)
    np.testing.assert_allclose(first["losses"], alone["losses"], rtol=1e-5)
    np.testing.assert_allclose(first["metric"], alone["metric"], rtol=1e-5)
    for one, single in zip(first["weights"], alone["weights"], strict=True):
        np.testing.assert_allclose(one, single, rtol=2e-5, atol=2e-5)


@modes
def test_reductions(ranks: Any, in_graph: bool) -> None:
    parts = [np.arange(2.0 * (r + 1)).reshape(-1, 2) + 10 * r for r in range(3)]
    whole = np.concatenate(parts)
    expected = {
        "sum": 6,
        "mean": 2,
        "rows": whole,
        "columns": whole.T,
        "merged": 3,
        "sparse": sum(np.pad(part, [(0, 3 - len(part)), (0, 0)]) for part in parts),
        "reduced": 3,
        "average": 1,
        "sum of rows": whole.sum(axis=0),
        "mean of rows": whole.mean(axis=0),
        "whole numbers": 6,
        "gathered": whole,
        "several": [3, 6],
        "local": 6,
    }
    for rank, found in enumerate(run(ranks(3), "reductions", in_graph)):
        assert found.pop("own") == rank
        assert found.pop("task") == ("worker", rank, 3)
        assert sorted(found) == sorted(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


@modes
def test_variables(ranks: Any, in_graph: bool) -> None:
    for rank, found in enumerate(run(ranks(2), "variables", in_graph)):
        assert found["before"] == {
            "sum": 5,
            "mean": 5,
            "first": 5,
            "read sum": 10,
            "read mean": 5,
        }
        assert found["after"] == {
            "sum": 3,
            "mean": 1.5,
            "first": 1,
            "read sum": 3,
            "read mean": 2.5,
        }
        assert found["local"] == rank + 2
        assert found["plain"] == [4, 5]
        assert found["late"] == [8]
        assert found["owns"] == [True, True, False]


@modes
def test_gradients_of_collectives(ranks: Any, in_graph: bool) -> None:
    """The loss is 1 + 2 times a sum of squares, whichever rank's values are changed."""
    for rank, found in enumerate(run(ranks(2), "gradients", in_graph)):
        np.testing.assert_allclose(found["sum"], 3 * 2 * np.array([3, 4]))
        np.testing.assert_allclose(found["mean"], 3 * np.array([1.5, 2]))
        np.testing.assert_allclose(found["gather"], 3 * 2 * np.array([1 + rank, 2]))


def test_an_overflow_on_one_rank(ranks: Any) -> None:
    for found in run(ranks(2), "overflow"):
        # Steps 0 and 2 count, each with the sum of two ranks' gradients of 1 and 2.
        assert found == {"weight": [-1.0, -2.0], "scale": 2.0, "iterations": 2}


def test_data(ranks: Any) -> None:
    first, second, third = run(ranks(3), "data")
    assert first["cut"] == [[0], [4], []]
    assert second["cut"] == [[1], [5], []]
    assert third["cut"] == [[2, 3], [6, 7], [8]]
    assert [found["static"] for found in (first, second, third)] == [1, 1, 2]
    assert [found["unknown"] for found in (first, second, third)] == [[0], [1], [2, 3]]
    assert third["ragged"] == [[], [4]]
    assert second["sparse"] == [[2, 0]]
    assert third["sparse"] == [[0, 0], [3, 4]]


def test_data_of_each_rank(ranks: Any) -> None:
    first, second = run(ranks(2), "data")
    assert first["own"] == [[0, 2], [4, 6], [8]]
    assert second["own"] == [[1, 3], [5, 7]]


def test_mistakes(ranks: Any) -> None:
    for texts in run(ranks(2), "mistakes"):
        for name in ("fit", "evaluate", "predict", "train_on_batch"):
            assert "use sdp_plugins.keras.SMDDPStrategy" in texts[name], name
        assert "Mixing different tf.distribute.Strategy objects" in texts["nested"]
        assert "requires being in cross-replica context" in texts["in run"]
        assert "requires being in cross-replica context" in texts["run in run"]
        assert "was not made in this strategy's scope" in texts["foreign"]
        assert "was not made in this strategy's scope" in texts["update"]
        assert "tf.expand_dims" in texts["scalar"]
        assert "call batch(global batch size)" in texts["unbatched"]
        assert "ndarray is no tf.data.Dataset" in texts["array"]
        assert "ranks 1 read another dataset than rank 0" in texts["shuffled"]
        assert "give shuffle a seed" in texts["shuffled"]
        assert "the job has another group" in texts["group"]


def test_checkpoints(ranks: Any, tmp_path: Path) -> None:
    first, second = run(ranks(2), "checkpoints", str(tmp_path))
    assert (first.pop("main"), second.pop("main")) == (True, False)
    assert first == second
    np.testing.assert_allclose(first["restored"], [-0.5, -0.5], rtol=1e-5)
    np.testing.assert_allclose(first["weight"], [-1, -1], rtol=1e-5)
    assert first["iterations"] == 2
    assert first["seen"] == 6
    assert "kept" in {path.name for path in tmp_path.iterdir()}


def test_a_lost_rank_is_named() -> None:
    env = environment("tensorflow")
    with start_ranks(2, JOBS.format("loses_a_rank"), env=env) as ranks:
        assert ranks[1].heard() == "in the middle"
        text = ranks[0].result()
    assert "rank 1" in text


def test_other_variables_are_named(ranks: Any) -> None:
    for text in run(ranks(2), "other_layers"):
        assert "ranks disagree" in text
