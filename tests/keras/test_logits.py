"""On TensorFlow, Keras computes crossentropies from the logits that it keeps of probabilities."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.keras.first_ranks import assert_same, on_ranks
from tests.keras.strategies import strategy


@on_ranks(2, ["tensorflow", "torch"])
def test_a_loss_object_as_metric_of_probabilities_near_zero(rank: int, world: int) -> None:
    x, y = np.arange(8.0).reshape(4, 2), np.array([0, 1, 0, 1])
    with strategy() as made:
        alone = saturated()
        model = saturated(made)
        expected = alone.evaluate(x, y, batch_size=4, verbose=0)
        assert model.evaluate(x, y, batch_size=4, verbose=0) == pytest.approx(expected, rel=1e-5)


def saturated(made: Any = None) -> Any:
    """A softmax of logits up to 700."""
    with made.scope() if made is not None else nullcontext():
        layer = layers.Dense(
            2, "softmax", kernel_initializer=keras.initializers.Constant([[50, 0]] * 2)
        )
        model = keras.Sequential([keras.Input((2,)), layer])
        crossentropy = keras.losses.SparseCategoricalCrossentropy
        model.compile("sgd", crossentropy(), metrics=[crossentropy(name="object")])
    return model


@pytest.mark.parametrize("eagerly", [False, True])
@on_ranks(2, ["tensorflow", "torch"])
def test_a_loss_of_all_rows_of_probabilities_near_one(rank: int, world: int, eagerly: bool) -> None:
    """Probabilities without a gradient: their only axis is the rows, so all ranks' are gathered."""
    x, y = np.array([[1.0], [2.0], [3.0], [5.0], [7.0]]), np.array([0, 1, 0, 1, 0])
    results = []
    with strategy() as made:
        for scope in (nullcontext(), made.scope()):
            layer = layers.Dense(1, kernel_initializer=keras.initializers.Constant(100))
            with scope:
                model = keras.Sequential(
                    [keras.Input((1,)), layer, layers.Reshape(()), layers.Activation("sigmoid")]
                )
                loss = keras.losses.BinaryCrossentropy()
                model.compile(keras.optimizers.SGD(1.0), loss, run_eagerly=eagerly)
            history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
            results.append([history.history["loss"], ops.convert_to_numpy(layer.kernel)])
    assert_same(results[1], results[0], 1e-5, "")
