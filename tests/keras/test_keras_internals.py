"""The private names of Keras: a version that moves one is refused in plain words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.keras.names import BACKENDS

pytestmark = pytest.mark.versions
OBJECTS = """
import keras, numpy as np
from sdp_plugins.keras import keras_internals

def main(rank, world):
    keras_internals.check()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    model.compile(optimizer, "mse")
    model.fit(np.zeros((2, 2)), np.zeros((2, 1)), verbose=0)
    objects = {
        "ArrayDataAdapter": keras_internals.data_adapters.get_data_adapter(
            np.zeros((3, 2)), batch_size=2
        ),
        "CompileLoss": model._compile_loss,
        "EpochIterator": keras_internals.EpochIterator(np.zeros((3, 2))),
        "Layer": model.layers[0],
        "LossFunctionWrapper": keras.losses.MeanSquaredError(),
        "Model": model,
        "MeanMetricWrapper": keras.metrics.MeanSquaredError(),
        "Optimizer": optimizer,
    }
    if keras.backend.backend() == "jax":
        objects["JAX's Model"] = model
    assert keras_internals.ATTRIBUTES.keys() - objects.keys() <= {"JAX's Model"}
    for name, each in objects.items():
        for attribute in keras_internals.ATTRIBUTES[name]:
            assert hasattr(each, attribute), f"Keras {keras.__version__}: {name}.{attribute}"
"""
MOVED = """
from sdp_plugins.keras import SMDDPStrategy, keras_internals

def main(rank, world):
    clip = keras_internals.BaseOptimizer._clip_gradients
    del keras_internals.BaseOptimizer._clip_gradients
    try:
        SMDDPStrategy()
    except ImportError as error:
        return str(error)
    finally:
        keras_internals.BaseOptimizer._clip_gradients = clip
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_names_are_there(keras_pool: Any, backend: str) -> None:
    keras_pool(backend, 1).run(OBJECTS)


def test_says_what_has_moved(keras_pool: Any) -> None:
    (text,) = keras_pool("torch", 1).run(MOVED)
    assert "has moved BaseOptimizer._clip_gradients" in text
    assert "Hint: use a version of Keras" in text
