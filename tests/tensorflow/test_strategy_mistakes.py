"""What the TensorFlow strategy refuses, and how it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import sdp_plugins.tensorflow as sdp
from sdp_plugins.tensorflow import SMDDPStrategy
from tests.keras.first_ranks import on_ranks
from tests.tensorflow.strategies import strategy_of_job

REFUSED = (ValueError, TypeError, RuntimeError, ImportError)
pytestmark = pytest.mark.versions


@on_ranks(2, ["tensorflow"])
def test_methods_of_keras(rank: int, world: int) -> None:
    x = np.zeros((4, 1), np.float32)
    with strategy_of_job() as strategy:
        with strategy.scope():
            model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        calls: list[Callable[[], Any]] = [
            lambda: model.fit(x, x, verbose=0),
            lambda: model.evaluate(x, x, verbose=0),
            lambda: model.predict(x, verbose=0),
            lambda: model.train_on_batch(x, x),
        ]
        for call in calls:
            with pytest.raises(REFUSED, match=r"use sdp_plugins\.keras\.SMDDPStrategy"):
                call()


@on_ranks(2, ["tensorflow"])
def test_contexts(rank: int, world: int) -> None:
    def nested(other: Any) -> None:
        with strategy.scope(), other.scope():
            pass

    def in_run() -> Any:
        return strategy.run(lambda: None)

    with strategy_of_job() as strategy:
        with pytest.raises(REFUSED, match=r"Mixing different tf\.distribute\.Strategy objects"):
            nested(tf.distribute.OneDeviceStrategy("/cpu:0"))
        for inner in (lambda: strategy.reduce("SUM", 1.0, axis=None), in_run):
            with pytest.raises(REFUSED, match="requires being in cross-replica context"):
                strategy.run(inner)


@on_ranks(2, ["tensorflow"])
def test_foreign_variables(rank: int, world: int) -> None:
    def train(variable: Any) -> Any:
        optimizer.apply_gradients([(tf.ones([1, 1]), variable)])

    with strategy_of_job() as strategy:
        foreign = tf.Variable([[1.0]])
        with strategy.scope():
            optimizer = tf.keras.optimizers.SGD()
        with pytest.raises(REFUSED, match="was not made in this strategy's scope"):
            strategy.run(train, args=(foreign,))
        with pytest.raises(REFUSED, match="was not made in this strategy's scope"):
            strategy.extended.update(foreign, lambda variable: variable + 1)


@on_ranks(2, ["tensorflow"])
def test_values_and_groups(rank: int, world: int) -> None:
    with strategy_of_job() as strategy:
        with pytest.raises(REFUSED, match=r"tf\.expand_dims"):
            strategy.gather(tf.constant(1.0), axis=0)
        with pytest.raises(REFUSED, match="the job has another group"):
            SMDDPStrategy(group=object())  # type: ignore[arg-type]


@on_ranks(2, ["tensorflow"])
def test_other_types_on_another_rank(rank: int, world: int) -> None:
    numbers = tf.ones((2, 3), tf.int32 if rank else tf.float32)
    rows = r"ranks disagree: rank 0: rows of float32\[3\]; rank 1: rows of int32\[3\]"
    whole = r"ranks disagree: rank 0: array 0 is float32\[2, 3\]; rank 1: array 0 is int32\[2, 3\]"
    with strategy_of_job() as strategy:
        with pytest.raises(REFUSED, match=rows):
            strategy.gather(numbers, axis=0)
        with pytest.raises(REFUSED, match=whole):
            sdp.broadcast(numbers, 0)


@on_ranks(2, ["tensorflow"])
def test_datasets(rank: int, world: int) -> None:
    numbers = tf.data.Dataset.range(8)
    with strategy_of_job() as strategy:
        distribute = strategy.experimental_distribute_dataset
        with pytest.raises(REFUSED, match=r"call batch\(global batch size\)"):
            distribute(numbers)
        with pytest.raises(REFUSED, match=r"ndarray is not a tf\.data\.Dataset"):
            distribute(np.zeros((4, 1), np.float32))
        shuffled = numbers.shuffle(8, seed=rank + 1).batch(8)
        with pytest.raises(REFUSED, match="ranks 1 read another dataset than rank 0") as caught:
            distribute(shuffled)
        assert "give shuffle a seed" in str(caught.value)
