"""On TensorFlow, Keras computes crossentropies from the logits that it keeps of probabilities."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests.keras.first_ranks import on_ranks
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
