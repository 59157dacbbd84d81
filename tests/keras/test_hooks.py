"""The private names of Keras: a version that moves one is refused in plain words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.keras.conftest import environment
from tests.keras.names import BACKENDS

OBJECTS = """
import keras, numpy as np
from sdp_plugins.keras import hooks

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
        assert hasattr(each, attribute), (name, attribute)
"""
MOVED = """
from sdp_plugins.keras import SMDDPStrategy, hooks

del hooks.BaseOptimizer._clip_gradients
try:
    SMDDPStrategy()
except ImportError as error:
    print(error)
"""


def python(code: str, backend: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **environment(backend)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("backend", BACKENDS)
def test_names_are_there(backend: str) -> None:
    python(OBJECTS, backend)


def test_says_what_has_moved() -> None:
    text = python(MOVED, "torch")
    assert "has moved BaseOptimizer._clip_gradients" in text
    assert "Hint: use a version of Keras" in text
