"""The strategy itself: misuse and failures, callbacks, loops of one's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.keras.conftest import environment
from tests.keras.names import BACKENDS
from tests.keras.test_fit import assert_same
from tests.ranks import HANG_S

FAILURES = {
    "other_layers": ["rank 1 has another model: ", "first/kernel float32[6, 4] there"],
    "other_optimizer": ["rank 1 has another model: ", "Hint: build and compile the same"],
    "other_call": ["fit(): rank 1 has called evaluate()"],
    "alone": ["did not arrive in 1.5 s", "all ranks must call evaluate()"],
    "stops_early": [
        "fit(): rank 1 has stopped after step 2 of epoch 1 (stop_training is set there); others "
        "go on with epoch 1. Hint: give all ranks the same callbacks",
    ],
    "stops_after_an_epoch": ["fit(): rank 0 has stopped after epoch 2", "rank 1 goes on. Hint: "],
    "shorter_data": [
        "fit(): rank 1 has stopped after step 2 of epoch 1 (its data has ended); others go on"
    ],
    "assigns_on_rank_0": [
        "fit(): rank 1 has other values than rank 0 after epoch 2, first in ",
        "/kernel'. Hint: a callback that assigns variables must assign the same on all ranks",
    ],
    "sets_rate_on_rank_0": ["rank 1 has other values than rank 0 after epoch 2", "learning_rate'"],
    "unreduced": ["is compiled with SparseCategoricalCrossentropy(reduction=None)", "Hint: use"],
    "raises": ["rank 1 gave up: ArithmeticError: the third layer is tired"],
    "other_batches": ["CollectiveMismatchError: [rank 0/2] rank 1 reads other batches. Hint: "],
    "ends_instead": ["PeerLostError: [rank 0/2] evaluate(): all ranks must call evaluate()"],
    "other_settings": ["rank 1 has another model: SGD momentum=0.75 there, SGD momentum=0.5 here"],
    "frozen_on_one_rank": [
        "rank 1 has another model: ",
        "/kernel float32[6, 8] (not trained) there",
    ],
    "own_arrays": ["rank 1 has passed other arrays than this one", "each takes its part"],
    "bad_data_on_one_rank": ["rank 1 gave up: ValueError: Data cardinality is ambiguous"],
    "other_targets": ["rank 1 has passed other arrays than this one"],
    "other_schedule": ["rank 1 has another model: SGD learning_rate=", '"decay_steps": 11'],
    "stateful": ["ValueError: layer 'keeps' is stateful", "stateful=False"],
    "compiled_outside": ["compiled outside of it", "with strategy.scope():"],
    "scope_in_scope": ["inside of the scope of another"],
    "two_strategies": ["belongs to another strategy"],
}
ON_ALL_BACKENDS = {"assigns_on_rank_0", "other_batches", "raises", "shorter_data", "stops_early"}
ALIKE_ON_ALL_RANKS = {
    "assigns_on_rank_0",
    "sets_rate_on_rank_0",
    "shorter_data",
    "stops_after_an_epoch",
    "stops_early",
    "unreduced",
}


def job(name: str) -> str:
    return f"from tests.keras.jobs import {name} as main"


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (backend, name)
        for name in FAILURES
        for backend in (BACKENDS if name in ON_ALL_BACKENDS else ["torch"])
    ],
)
def test_failures_are_named(keras_pool: Any, backend: str, name: str) -> None:
    texts = keras_pool(backend, 2).run(job("failure"), name)
    for part in FAILURES[name]:
        assert part in texts[0], texts
        assert part in texts[1] or name not in ALIKE_ON_ALL_RANKS, texts
    if name == "raises":
        assert "tired" in texts[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_scope_may_be_entered_again(keras_pool: Any, backend: str) -> None:
    keras_pool(backend, 2).run(job("same_scope_again"))


@pytest.mark.versions
def test_a_model_outside_is_warned_of(keras_pool: Any) -> None:
    for lines in keras_pool("torch", 2).run(job("outside")):
        assert len(lines) == 1
        assert "'alone' was compiled outside of strategy.scope(): fit() trains it" in lines[0]


def test_rank_0_logs_that_it_is_in_use(keras_pool: Any) -> None:
    (first, files), (second, _) = keras_pool("torch", 2).run(job("signs"))
    assert first == ["fit: smddp trains model 'sequential' on 2 ranks"]
    assert second == []
    assert files == ["epoch_iterator.py"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_again(keras_pool: Any, backend: str) -> None:
    one, other = keras_pool(backend, 2).run(job("compiled_again"))
    assert_same(one, other, 0.0, "values")


def test_works_without_a_launcher(keras_pool: Any) -> None:
    ((size, lines),) = keras_pool("torch", 1).run(job("without_launcher"))
    assert size == 1
    assert len(lines) == 1
    assert "one rank only" in lines[0]


@pytest.mark.versions
def test_rank_0_writes(keras_pool: Any, tmp_path: Path) -> None:
    first, second = keras_pool("torch", 2).run(job("writes"), str(tmp_path))
    assert first["files"] == ["log.csv", "model.keras", "saved.keras"]
    assert second["files"] == ["saved.keras"]  # the program's own doing
    assert_same(first["history"], second["history"], 0.0, "history")
    load = (
        "import sys, keras; keras.models.load_model(sys.argv[1]).predict(keras.ops.zeros((2, 6)), "
        "verbose=0); assert 'sdp_plugins.keras' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", load, str(tmp_path / "0" / "model.keras")],
        env={"PATH": "/usr/bin:/bin", "SDP_AUTOLOAD": "0", **environment("jax")},
        check=True,
        timeout=HANG_S,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_callbacks_decide_alike(keras_pool: Any, backend: str) -> None:
    first, second = keras_pool(backend, 2).run(job("decides"))
    assert len(first["history"]["loss"]) < 8
    assert_same(first, second, 0.0, "")


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_on_one_rank_ends_training_on_all(keras_pool: Any, backend: str) -> None:
    assert keras_pool(backend, 2).run(job("poisoned")) == [2, 2]


@pytest.mark.versions
def test_backup_resumes_all_ranks(keras_pool: Any, tmp_path: Path) -> None:
    pool = keras_pool("torch", 2)
    resumed = pool.run(job("backs_up"), str(tmp_path))
    whole = pool.run(job("uninterrupted"))
    assert_same(resumed[0], whole[0], 0.0, "rank 0")
    assert_same(resumed[1], whole[0], 0.0, "rank 1")


@pytest.mark.versions
@pytest.mark.parametrize("backend", BACKENDS)
def test_own_loops(keras_pool: Any, backend: str) -> None:
    for each in (ranks := keras_pool(backend, 3).run(job("own_loop"))):
        assert each["mean"].tolist() == [1, 2, 3]
        assert each["sum"].tolist() == [3, 6, 9]
        assert each["transposed"].tolist() == [[0, 2], [1, 3]]
        assert each["rows"].tolist() == [[0, 0], *[[1, 1]] * 2, *[[2, 2]] * 3]
        assert each["columns"].tolist() == np.transpose(each["rows"]).tolist()
        assert each["variable"].tolist() == [2, 2, 2, 2]
        assert each["predicted"] == (7, 3)
        assert each["on_batch"] == ranks[0]["on_batch"]
        assert each["on_batch"][0]["seen_rows"] == 7


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_accumulation_goes_on_in_the_next_epoch(keras_pool: Any, backend: str) -> None:
    first, second = keras_pool(backend, 2).run(job("accumulates_over_epochs"))
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.versions
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
@pytest.mark.parametrize("switch", ["0", "1"])
def test_with_and_without_native_operations(keras_pool: Any, backend: str, switch: str) -> None:
    found = keras_pool(backend, 2).run(job("transport"), switch)
    assert found == [{"0": "copies", "1": "native"}[switch]] * 2


def test_xla_is_undone(keras_pool: Any) -> None:
    first, second = keras_pool("tensorflow", 2).run(job("xla_undone"))
    for compiled, lines, _ in (first, second):
        assert not compiled
        assert sum("jit_compile=True is undone" in line for line in lines) == 1
    assert first[2] == second[2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_closed_group_is_named(keras_pool: Any, backend: str) -> None:
    for text in keras_pool(backend, 2).run(job("end_of_group")):
        assert "closed" in text


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_host_communicates_between_steps(keras_pool: Any, backend: str) -> None:
    ranks = keras_pool(backend, 2).run(job("between_steps"))
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dataset_is_shuffled_alike(keras_pool: Any, backend: str) -> None:
    """By default, with other random numbers on every rank; anew in every epoch."""
    ranks = keras_pool(backend, 2).run(job("shuffled_batches"))
    orders = [epoch[-5:] for epoch in ranks[0]]
    assert [epoch[-5:] for epoch in ranks[1]] == orders
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders)
    assert len({tuple(order) for order in orders}) > 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_accumulate_from_fit_to_fit(keras_pool: Any, backend: str) -> None:
    (alone,) = keras_pool(backend, 1).run(job("accumulates_over_two_fits"))
    ranks = keras_pool(backend, 2).run(job("accumulates_over_two_fits"))
    for mine, other, expected in zip(*ranks, alone, strict=True):
        np.testing.assert_array_equal(mine, other)
        if mine.dtype.kind == "f":  # the others are counters, and random states of one rank's own
            np.testing.assert_allclose(mine, expected, atol=2e-5)


def test_all_ranks_may_read_what_rank_0_has_written(keras_pool: Any, tmp_path: Path) -> None:
    ranks = keras_pool("torch", 2).run(job("reads_what_rank_0_wrote"), str(tmp_path))
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_one_rank_has_loaded(keras_pool: Any, backend: str) -> None:
    ranks = keras_pool(backend, 2).run(job("loaded_on_one_rank"))
    assert ranks[0] == ranks[1]
    assert ranks[0][0] == pytest.approx(np.log(3), rel=1e-5)
    assert ranks[0][1] == 0.0
