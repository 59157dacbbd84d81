"""Random models train on ranks as they do in one process, and a difference is found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import keras
import numpy as np
import pytest

from stress.keras import heads, training
from stress.keras.compare import is_finite
from stress.keras.job import prepared
from stress.keras.layers import LAYERS
from stress.keras.plan import Plan, case
from stress.keras.reduce import candidates, reduced
from stress.keras.run import LIMIT_S, Runner
from tests.keras.first_ranks import BACKENDS, on_ranks, processes

SEED = 1
CASES = {
    "torch": (0, 1, 2, 4, 5, 7, 8, 10, 12, 13, 14, 15, 16, 17, 20),
    "tensorflow": (0, 2, 3),
    "jax": (3, 4, 6),
}
"""Of the seed: some of each backend that do not take long."""
SPOILED = 7
PLANS = 3000


def runner(rank_pools: Any, backend: str, spoil: str = "") -> Runner:
    """On the processes of the other tests."""
    return Runner(processes(rank_pools, backend), spoil)


@pytest.mark.parametrize(
    ("backend", "index"), [(backend, index) for backend in BACKENDS for index in CASES[backend]]
)
@pytest.mark.timeout(2 * LIMIT_S)
def test_random_models_equal_one_process(rank_pools: Any, backend: str, index: int) -> None:
    plan = case(backend, SEED, index)
    outcome = runner(rank_pools, backend).run(plan)
    assert outcome.kind == "equal", f"{outcome.text}\n{plan.describe()}"


def options_of_the_process() -> Any:
    if keras.backend.backend() == "jax":
        import jax

        return jax.config.read("jax_enable_x64")
    import tensorflow as tf

    return tf.config.optimizer.get_experimental_options()["disable_meta_optimizer"]


@on_ranks(1, ["tensorflow", "jax"])
def test_other_tests_find_the_backend_as_it_was(rank: int, world: int) -> None:
    """TensorFlow rounds otherwise where it does not optimize graphs."""
    before = options_of_the_process()
    drawn = case(keras.backend.backend(), SEED, 0)
    plan = replace(drawn, dtype="float64", fit={**drawn.fit, "optimize_graph": False})
    with prepared(plan, rank):
        assert options_of_the_process() != before
    assert options_of_the_process() == before


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        ("loss", "differs by"),
        ("weights", "rank 1 has other values than rank 0"),
        ("shard", "differs by"),
    ],
)
@pytest.mark.timeout(2 * LIMIT_S)
def test_what_is_done_wrong_on_purpose_is_found(rank_pools: Any, spoil: str, told: str) -> None:
    outcome = runner(rank_pools, "torch", spoil).run(case("torch", SEED, SPOILED, [2]))
    assert outcome.kind == "different"
    assert told in outcome.text


@cache
def many(backend: str = "tensorflow") -> list[Plan]:
    return [case(backend, 5, index) for index in range(PLANS)]


def test_a_training_that_diverges_is_no_evidence() -> None:
    result = {"weights": {"0 a": np.zeros(2)}, "evaluation": {"loss": np.array(0.5)}}
    assert is_finite(result)
    assert is_finite(result | {"prediction": {"output 0": np.array(-np.inf)}})
    assert not is_finite(result | {"evaluation": {"loss": np.array(np.nan)}})
    assert not is_finite(result | {"prediction": {"output 0": np.array(np.nan)}})
    assert not is_finite(result | {"optimizer": {"0 momentum": np.array(np.inf)}})


def test_plans_come_from_seed_and_index_alone() -> None:
    first = many()[:50]
    assert first == [case("tensorflow", 5, index) for index in range(50)]
    assert [Plan.from_json(plan.to_json()) for plan in first] == first
    assert len({plan.to_json() for plan in many()}) == PLANS


def test_all_of_the_tables_is_drawn() -> None:
    plans = many()
    assert {v.layer for p in plans for v in p.values} == {row.layer for row in LAYERS} | {"Input"}
    outputs = [output for plan in plans for output in plan.outputs]
    assert {output.loss for output in outputs} == {row.loss for row in heads.LOSSES}
    metrics = {row.metric for rows in heads.METRICS.values() for row in rows}
    assert {name for output in outputs for name, _, _ in output.metrics} == metrics
    assert {plan.optimizer["name"] for plan in plans} == set(training.OPTIMIZERS)
    assert {plan.dtype for plan in plans} == set(training.DTYPES)
    options = {name for plan in plans for name in (*plan.optimizer, *plan.fit)}
    assert options >= {"clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps",
                       "use_ema", "weight_decay", "class_weight", "validation_split"}  # fmt: skip


def test_what_is_known_to_differ_is_not_drawn() -> None:
    plans = [*many(), *many("torch")]
    for plan in plans:
        losses = {output.loss for output in plan.outputs}
        assert plan.optimizer["name"] != "Lion" or not losses.intersection(heads.PIECEWISE_LINEAR)
    for plan in many():
        assert not plan.fit.get("run_eagerly") or not any(
            v.options.get("shared") for v in plan.values
        )
    assert any(plan.optimizer["name"] == "Lion" for plan in plans)
    assert any(plan.fit.get("run_eagerly") for plan in many())


def test_a_plan_is_made_small() -> None:
    """As if the difference came of a layer and an option."""

    def differs(plan: Plan) -> bool:
        return "clipnorm" in plan.optimizer and any(v.layer == "Dense" for v in plan.values)

    plan = max(filter(differs, many()), key=lambda plan: len(plan.values))
    small = reduced(plan, differs, 1000)
    assert differs(small)
    assert not any(differs(smaller) for smaller in candidates(small) if smaller != small)
    assert len(small.values) <= 4 < len(plan.values)
    assert len(small.outputs) == 1
