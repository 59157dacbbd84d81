"""The private names of Keras: a version that moves one is refused in plain words."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.keras.first_ranks import BACKENDS, on_ranks

pytestmark = pytest.mark.versions


@on_ranks(1, BACKENDS)
def test_names_are_there(rank: int, world: int) -> None:
    from sdp_plugins.keras import keras_internals

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
    objects["Variable"] = optimizer._iterations
    if keras.backend.backend() == "jax":
        objects["JAX's Model"] = model
    if keras.backend.backend() == "torch":
        objects["torch's Optimizer"] = optimizer
    if hasattr(keras.optimizers, "MultiOptimizer"):
        objects["MultiOptimizer"] = keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(keras.optimizers.SGD())
        )
    missing = keras_internals.ATTRIBUTES.keys() - objects.keys()
    assert missing <= {"JAX's Model", "torch's Optimizer", "MultiOptimizer"}
    for name, each in objects.items():
        for attribute in keras_internals.ATTRIBUTES[name]:
            assert hasattr(each, attribute), f"Keras {keras.__version__}: {name}.{attribute}"


@on_ranks(1)
def test_says_what_has_moved(rank: int, world: int) -> None:
    from sdp_plugins.keras import SMDDPStrategy, keras_internals

    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(keras_internals.BaseOptimizer, "_clip_gradients")
        with pytest.raises(ImportError) as caught:
            SMDDPStrategy()
    assert "has moved BaseOptimizer._clip_gradients" in str(caught.value)
    assert "Hint: use a version of Keras" in str(caught.value)
