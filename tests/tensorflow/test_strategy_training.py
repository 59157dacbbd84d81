"""Training by the TensorFlow strategy, in loops of one's own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import sdp_plugins.tensorflow as sdp
from tests.keras.first_ranks import FirstRanks, on_ranks
from tests.tensorflow.strategies import strategy_of_job, traced

GLOBAL_BATCH = 7
pytestmark = pytest.mark.versions


def rows_of_training() -> Any:
    """Four batches, of which the last is short: three ranks have 2, 2, 3 and 1, 2, 2 rows."""
    random = np.random.default_rng(0)
    x = random.normal(size=(26, 5)).astype(np.float32)
    ids = random.integers(0, 6, (26, 2))
    y = random.normal(size=(26, 3)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, ids, y)).batch(GLOBAL_BATCH)


def build_model() -> Any:
    x, ids = tf.keras.Input((5,)), tf.keras.Input((2,), dtype="int64")
    table = tf.keras.layers.Flatten()(tf.keras.layers.Embedding(6, 3)(ids))
    hidden = tf.keras.layers.Concatenate()([x, table])
    hidden = tf.keras.layers.Dense(8, use_bias=False)(hidden)
    hidden = tf.keras.layers.BatchNormalization(synchronized=True)(hidden)
    return tf.keras.Model([x, ids], tf.keras.layers.Dense(3)(tf.keras.activations.tanh(hidden)))


def training(rank: int, world: int, in_graph: bool) -> dict[str, Any]:
    """TensorFlow's guide to custom training: a global loss, metrics, a loop over batches."""
    tf.keras.utils.set_random_seed(1 if world == 1 else 1 + rank)
    with strategy_of_job() as strategy:
        with strategy.scope():
            model = build_model()
            optimizer = tf.keras.optimizers.AdamW(0.05, weight_decay=0.02)
            seen = tf.keras.metrics.Mean()
        data = strategy.experimental_distribute_dataset(rows_of_training())

        def step(x: Any, ids: Any, target: Any) -> Any:
            with tf.GradientTape() as tape:
                each = tf.reduce_mean((model([x, ids], training=True) - target) ** 2, axis=-1)
                loss = tf.nn.compute_average_loss(each, global_batch_size=GLOBAL_BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            if loss > -1.0:  # a conditional that autograph has to convert
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            seen.update_state(each)
            return loss

        def train(batch: Any) -> Any:
            return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

        compiled = traced(train, in_graph)
        losses, after_steps = [], []
        for batch in chain(data, data):
            losses.append(float(compiled(batch)))
            variables = (*optimizer.variables, *model.weights)
            after_steps.append([variable.numpy().copy() for variable in variables])
        return {
            "losses": losses,
            "after_steps": after_steps,
            "metric": float(seen.result()),
            "weights": model.get_weights(),
            "iterations": int(optimizer.iterations.numpy()),
        }


@pytest.mark.parametrize(
    ("world", "in_graph"),
    [
        pytest.param(2, False, id="eager-2"),
        pytest.param(2, True, id="graph-2"),
        pytest.param(3, True, id="graph-3"),
    ],
)
def test_training_equals_one_rank(
    ranks: Callable[[int], FirstRanks], in_graph: bool, world: int
) -> None:
    """With an embedding's sparse gradients, and BatchNormalization over all ranks' rows."""
    (alone,) = ranks(1).run(training, in_graph)
    first, *others = ranks(world).run(training, in_graph)
    assert alone["iterations"] == first["iterations"] == 8
    for other in others:
        assert other["losses"] == first["losses"]
        assert other["metric"] == first["metric"]
        for step, both in enumerate(zip(first["after_steps"], other["after_steps"], strict=True)):
            for variable, (one, two) in enumerate(zip(*both, strict=True)):
                where = f"variable {variable} after step {step}"
                np.testing.assert_array_equal(one, two, where)
    np.testing.assert_allclose(first["losses"], alone["losses"], rtol=1e-5)
    np.testing.assert_allclose(first["metric"], alone["metric"], rtol=1e-5)
    for one, single in zip(first["weights"], alone["weights"], strict=True):
        np.testing.assert_allclose(one, single, rtol=2e-5, atol=2e-5)


@on_ranks(2, ["tensorflow"])
def test_an_overflow_on_one_rank(rank: int, world: int) -> None:
    """Half of the steps overflow: all ranks skip them, and halve their scales.

    Steps 0 and 2 count, each with the sum of two ranks' gradients of 1 and 2.
    """
    with strategy_of_job() as strategy:
        with strategy.scope():
            weight = tf.Variable([1.0, 2.0])
            optimizer = tf.keras.optimizers.LossScaleOptimizer(
                tf.keras.optimizers.SGD(0.5), initial_scale=8.0
            )

        def step(number: Any) -> None:
            last = rank == world - 1
            value = tf.where((number % 2 == 1) & last, np.float32(np.inf), 1.0)
            gradient = tf.stack([value, 2.0]) * optimizer.scale_loss(1.0)
            optimizer.apply_gradients([(gradient, weight)])

        compiled = tf.function(lambda number: strategy.run(step, args=(number,)))
        for number in range(4):
            compiled(tf.constant(number))
        assert weight.numpy().tolist() == [-1.0, -2.0]
        assert float(optimizer.dynamic_scale.numpy()) == 2.0
        assert int(optimizer.iterations.numpy()) == 2


@on_ranks(2, ["tensorflow"])
def test_checkpoints(rank: int, world: int, tmp_path: Path) -> None:
    """As TensorFlow's guide has it: all ranks save, and only rank 0's file is kept."""
    with strategy_of_job() as strategy:

        def make() -> Any:
            with strategy.scope():
                seen = tf.Variable(
                    0.0,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.SUM,
                )
                weight = tf.Variable([0.0, 0.0])
                optimizer = tf.keras.optimizers.Adam(0.5)
                optimizer.build([weight])
            return weight, seen, optimizer

        def step() -> None:
            optimizer.apply_gradients([(tf.constant([1.0, rank + 1.0]), weight)])
            seen.assign_add(rank + 1.0)

        weight, seen, optimizer = make()
        strategy.run(step)
        main = strategy.extended.should_checkpoint
        path = tmp_path / ("kept" if main else f"thrown-away-{rank}")
        saved = tf.train.Checkpoint(w=weight, s=seen, o=optimizer)
        tf.train.CheckpointManager(saved, str(path), max_to_keep=1).save()
        sdp.get_worker_comm().Barrier()

        weight, seen, optimizer = make()
        again = tf.train.Checkpoint(w=weight, s=seen, o=optimizer)
        again.restore(tf.train.latest_checkpoint(str(tmp_path / "kept"))).assert_consumed()
        np.testing.assert_allclose(weight.numpy(), [-0.5, -0.5], rtol=1e-5)
        strategy.run(step)
        assert main is (rank == 0)
        np.testing.assert_allclose(weight.numpy(), [-1, -1], rtol=1e-5)
        assert int(optimizer.iterations.numpy()) == 2
        assert float(seen.numpy()) == 6
    assert "kept" in {path.name for path in tmp_path.iterdir()}
