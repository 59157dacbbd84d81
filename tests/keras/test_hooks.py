"""The private names of Keras: a version that moves one is refused in plain words."""

from __future__ import annotations

from typing import Any

import pytest

from tests.keras.names import BACKENDS

pytestmark = pytest.mark.versions
OBJECTS = """
import keras, numpy as np
from sdp_plugins.keras import hooks

def main(rank, world):
    hooks.check()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile()
    objects = [
        hooks.data_adapters.get_data_adapter(np.zeros((3, 2)), batch_size=2),
        model.layers[0], model, keras.metrics.MeanSquaredError(), keras.optimizers.SGD(),
    ]
    names = ["ArrayDataAdapter", "Layer", "Model", "MeanMetricWrapper", "Optimizer"]
    assert names == list(hooks.ATTRIBUTES)
    for name, each in zip(names, objects):
        for attribute in hooks.ATTRIBUTES[name]:
            assert hasattr(each, attribute), f"Keras {keras.__version__}: {name}.{attribute}"
"""
MOVED = """
from sdp_plugins.keras import SMDDPStrategy, hooks

def main(rank, world):
    clip = hooks.BaseOptimizer._clip_gradients
    del hooks.BaseOptimizer._clip_gradients
    try:
        SMDDPStrategy()
    except ImportError as error:
        return str(error)
    finally:
        hooks.BaseOptimizer._clip_gradients = clip
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_names_are_there(keras_pool: Any, backend: str) -> None:
    keras_pool(backend, 1).run(OBJECTS)


def test_says_what_has_moved(keras_pool: Any) -> None:
    (text,) = keras_pool("torch", 1).run(MOVED)
    assert "has moved BaseOptimizer._clip_gradients" in text
    assert "Hint: use a version of Keras" in text
