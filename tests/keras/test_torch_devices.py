"""Keras on torch with its variables on an accelerator, the simulated one, trains as on CPUs."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import numpy as np

from tests.keras.first_ranks import environment
from tests.ranks import run_ranks

WORLD = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"optimizer": "sgd"},
    "adam": {"optimizer": "adam", "metrics": ["accuracy"]},
    "clipping": {"clip": 0.1},
    "accumulating": {"accumulate": 2},
}


def on_cpus(rank: int, world: int) -> dict[str, list[Any]]:
    return {name: fit(rank, "cpu", name) for name in OPTIONS}


def on_device(rank: int, world: int, device: str) -> list[tuple[str, list[Any]]]:
    """What models come to with flags between device and CPU, and one without them."""
    os.environ["KERAS_TORCH_DEVICE"] = device
    if device == "simdev":
        from sdp_plugins.torch.accelerator.drivers import register_driver
        from tests import simdev
        from tests.torch.accelerator import SimulatedDriver

        simdev.load()
        register_driver("simdev", SimulatedDriver())
    found = [(name, fit(rank, device, name)) for name in OPTIONS]
    os.environ["SDP_DEVICE_FLAGS"] = "0"
    found.append(("adam", fit(rank, device, "adam")))  # both ways have the same gradients
    if device == "simdev":
        import torch

        torch.accelerator.synchronize()
        assert simdev.registered() == {}
    return found


def fit(rank: int, device: str, name: str) -> list[Any]:
    """Weights, history and predictions of a model on Keras' default device."""
    import keras

    from sdp_plugins.keras import SMDDPStrategy
    from sdp_plugins.keras.backends.torch_devices import DeviceGradients

    options = dict(OPTIONS[name])
    if clip := options.pop("clip", None):
        options["optimizer"] = keras.optimizers.Adam(global_clipnorm=clip)
    if count := options.pop("accumulate", None):
        options["optimizer"] = keras.optimizers.SGD(gradient_accumulation_steps=count)
    keras.utils.set_random_seed(5 + rank)
    strategy = SMDDPStrategy()
    with strategy.scope():
        layers = [keras.layers.Dense(20, activation="relu"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(loss=loss, **options)
    random = np.random.default_rng(0)
    # Devices draw first weights of their own.
    model.set_weights([0.3 * random.normal(size=weight.shape) for weight in model.weights])
    x, y = random.normal(size=(30, 8)).astype("float32"), random.integers(0, 3, 30)
    average = DeviceGradients.average
    with mock.patch.object(DeviceGradients, "average", autospec=True, side_effect=average) as calls:
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x, y))
    assert calls.called == (device != "cpu")
    predicted = model.predict(x, verbose=0)
    assert {variable.value.device.type for variable in model.trainable_weights} == {device}
    weights = [keras.ops.convert_to_numpy(weight) for weight in model.weights]
    strategy.close()
    return [*weights, predicted, *history.history.values()]


def test_trains_as_on_cpus(keras_pool: Any) -> None:
    assert_trains_as_on_cpus("simdev", keras_pool)


def assert_trains_as_on_cpus(device: str, keras_pool: Any) -> None:
    env = environment("torch")
    if device == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = "0"
    expected, _ = keras_pool("torch", WORLD).run(on_cpus)
    first, second = run_ranks(WORLD, on_device, device, env=env)
    for (name, mine), (_, others) in zip(first, second, strict=True):
        for value, other, on_cpu in zip(mine, others, expected[name], strict=True):
            np.testing.assert_array_equal(value, other)
            np.testing.assert_allclose(value, on_cpu, rtol=1e-4, atol=1e-5)
