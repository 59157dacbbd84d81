"""Keras on torch: updates by shards change nothing but the time and the memory that they take."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
from keras import layers, optimizers

from tests.core.test_groups import shared_mappings
from tests.keras.case import variables
from tests.keras.first_ranks import assert_same, first_ranks, on_ranks
from tests.keras.strategies import error_of, strategy

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipvalue=0.01),
    "Adam": lambda: optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(optimizers.schedules.ExponentialDecay(0.01, 3, 0.5)),
    "averages": lambda: optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True, weight_decay=0.1),
    "Adagrad": lambda: optimizers.Adagrad(0.01, loss_scale_factor=8),
    "Adadelta": lambda: optimizers.Adadelta(0.1),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "Lion": lambda: optimizers.Lion(0.001),
}
X, Y = np.random.default_rng(0).random((2, 53, 6, 7), np.float32)


def model_of(made: Any, optimizer: Any) -> Any:
    """Weights in several orders of elements, small and large, and one that is not trained."""
    with made.scope():
        model = keras.Sequential(
            [
                keras.Input((6, 7)),
                layers.SimpleRNN(33, return_sequences=True),
                layers.BatchNormalization(),
                layers.Dense(300, "relu"),
                layers.Dense(5, trainable=False),
                layers.Dense(7),
            ]
        )
        model.compile(optimizer, "mse")
    return model


def fit(model: Any, *callbacks: Any, **options: Any) -> list[float]:
    given = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(X, Y, callbacks=list(callbacks), **given | options).history["loss"]


def is_sharded(made: Any, model: Any) -> bool:
    return model in made._context.backend._updates


@contextmanager
def sharding(allowed: bool) -> Iterator[None]:
    from sdp_plugins.keras.backends import torch

    never = mock.patch.object(torch, "can_shard", return_value=False)
    with mock.patch.object(torch, "can_shard", torch.can_shard) if allowed else never:
        yield


def with_and_without(run: Callable[[Any], Any], optimizer: Callable[[], Any]) -> Any:
    """What a function makes of a model with and without shards, which must be the same bits."""
    found = []
    for allowed in True, False:
        with sharding(allowed), strategy() as made:
            model = model_of(made, optimizer())
            result = run(model)
            assert is_sharded(made, model) == allowed
            found.append([result, list(variables(model).values())])
    assert_same(*found, 0.0, "")
    return found[0][0]


@pytest.mark.versions
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_same_bits(rank: int, world: int, name: str) -> Any:
    def run(model: Any) -> Any:
        return fit(model), fit(model, epochs=1), model.evaluate(X, Y, verbose=0)

    return with_and_without(run, OPTIMIZERS[name])


class Writing(keras.callbacks.Callback):
    """Changes weights and state between steps."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            for variable in self.model.trainable_variables:
                variable.assign(variable * 0.5)
            self.model.layers[2].kernel.value.data.clamp_(-0.01, 0.01)
            self.model.optimizer.variables[2].assign(self.model.optimizer.variables[2] + 1)


@on_ranks(2)
def test_callbacks_write(rank: int, world: int) -> Any:
    stop = {"monitor": "loss", "patience": 0, "mode": "max", "restore_best_weights": True}

    def run(model: Any) -> Any:
        return fit(model, Writing()), fit(model, keras.callbacks.EarlyStopping(**stop), epochs=4)

    return with_and_without(run, OPTIMIZERS["momentum"])


@on_ranks(2)
def test_the_optimizer_is_used_elsewhere(rank: int, world: int) -> Any:
    """By a loop of the program's own, between two calls of `fit`, on each rank with its data."""

    def run(model: Any) -> Any:
        losses = [fit(model)]
        gradients = []
        for step in range(2):
            loss = keras.ops.mean(model(X[step : step + 4], training=False))
            model.zero_grad()
            loss.backward()
            gradients = [variable.value.grad for variable in model.trainable_variables]
            model.optimizer.apply([gradient.clone() for gradient in gradients])
        return *losses, [np.asarray(each) for each in gradients], fit(model)

    return with_and_without(run, OPTIMIZERS["Adam"])


@on_ranks(2)
def test_what_is_trained_changes(rank: int, world: int) -> Any:
    def run(model: Any) -> Any:
        losses = fit(model)
        model.layers[2].trainable = False
        losses += fit(model)
        model.layers[3].trainable = True
        model.compile(optimizers.Nadam(0.01), "mse")
        losses += fit(model)
        model.layers[2].kernel._value.data = model.layers[2].kernel._value.data.clone()
        return losses + fit(model) + [model.train_on_batch(X[:9], Y[:9])]

    return with_and_without(run, OPTIMIZERS["Adam"])


@on_ranks(2)
def test_rank_0_saves_alone(rank: int, world: int, tmp_path: Path) -> Any:
    def run(model: Any) -> Any:
        path = tmp_path / f"{rank}.keras"
        losses = fit(model, keras.callbacks.ModelCheckpoint(str(path)))
        assert path.exists() == (rank == 0)
        if rank == 0:
            saved = keras.models.load_model(path)
            both = [list(variables(each).values()) for each in (saved, model)]
            assert_same(*both, 0.0, "")
        return losses

    return with_and_without(run, OPTIMIZERS["Adam"])


def halve(variable: Any, rank: int) -> None:
    variable.assign(variable * (0.5 if rank else 1.0))


@pytest.mark.parametrize("which", ["kernel", "momentum", "both"])
@on_ranks(2)
def test_different_writes_are_named(rank: int, world: int, which: str) -> None:
    class Alone(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            kernel, momentum = self.model.layers[0].variables[0], self.model.optimizer.variables[2]
            assert momentum.shape == kernel.shape
            if which == "both":  # each on one rank
                halve(kernel if rank else momentum, 1)
            else:
                halve(kernel if which == "kernel" else momentum, rank)

    with strategy() as made:
        text = error_of(fit, model_of(made, OPTIMIZERS["momentum"]()), Alone())
    assert "to different values since the last step" in text, text
    assert ("momentum" in text) == (which != "kernel") and "kernel" in text, text
    assert "Hint: change weights and state alike on all ranks, or broadcast them" in text


@on_ranks(2)
def test_what_needs_whole_gradients_is_not_sharded(rank: int, world: int) -> None:
    class Own(optimizers.SGD):
        pass

    from sdp_plugins.keras.backends import torch_shards

    def overridden() -> Any:
        optimizer = optimizers.SGD(0.1)
        apply = optimizer.apply
        optimizer.apply = lambda grads, variables=None: apply(grads, variables)
        return optimizer

    def constrain(model: Any) -> None:
        model.layers[2].kernel.constraint = keras.constraints.NonNeg()

    with strategy() as made:
        for optimizer, change in [
            (optimizers.SGD(0.1, clipnorm=1.0), None),
            (optimizers.SGD(0.1, global_clipnorm=1.0), None),
            (optimizers.SGD(0.1, gradient_accumulation_steps=2), None),
            (optimizers.Adafactor(0.1), None),
            (optimizers.Ftrl(0.1), None),
            (optimizers.LossScaleOptimizer(optimizers.SGD(0.1)), None),
            (Own(0.1), None),
            (optimizers.SGD(lambda: 0.1), None),
            (overridden(), None),
            (optimizers.SGD(0.1), constrain),
        ]:
            model = model_of(made, optimizer)
            (change or bool)(model)
            fit(model, epochs=1)
            assert not is_sharded(made, model), optimizer
        model = model_of(made, optimizers.SGD(0.1))
        fit(model)
        assert is_sharded(made, model)
        model.optimizer.clipnorm = 1.0
        fit(model)
        assert not is_sharded(made, model)
        with mock.patch.object(torch_shards, "can_tell_writes", return_value=False):
            fit(other := model_of(made, optimizers.SGD(0.1)))
        assert not is_sharded(made, other)


@on_ranks(2)
def test_the_model_is_left_as_it_was(rank: int, world: int) -> None:
    with strategy() as made:
        model = model_of(made, optimizers.SGD(0.1))
        fit(model)
        assert all(variable.value.grad is None for variable in model.trainable_variables)
    kernel = model.layers[2].kernel.value
    before = kernel.detach().clone()
    keras.ops.mean(model(X)).backward()
    assert (kernel.grad != 0).any()
    kernel.data -= kernel.grad * (rank + 1)
    assert (kernel == before - kernel.grad * (rank + 1)).all()


@on_ranks(2)
def test_models_are_freed(rank: int, world: int) -> None:
    with strategy() as made:
        made.all_reduce(np.ones(3, np.float32))
        before = shared_mappings()
        for _ in range(3):
            fit(model := model_of(made, optimizers.Adam(0.1)))
            kernel = weakref.ref(model.layers[0].variables[0]._value)
            assert shared_mappings() > before
            del model
            for _ in range(3):
                gc.collect()
            assert kernel() is None
            for _ in range(2):
                made.all_reduce(np.ones(3, np.float32))
            assert shared_mappings() == before


@on_ranks(2)
def test_models_that_share_a_layer(rank: int, world: int) -> None:
    """The first of them is sharded."""
    found = []
    for allowed in True, False:
        with sharding(allowed), strategy() as made, made.scope():
            shared = layers.Dense(7)
            models = [keras.Sequential([shared, layers.Dense(7)]) for _ in range(2)]
            for model in models:
                model.compile(optimizers.Adam(0.1), "mse")
            losses = [float(model.train_on_batch(X, Y)) for _ in range(3) for model in models]
            assert [is_sharded(made, model) for model in models] == [allowed, False]
            models[0].compile(optimizers.SGD(0.1, clipnorm=1.0), "mse")
            losses += [float(model.train_on_batch(X, Y)) for _ in range(2) for model in models]
            assert [is_sharded(made, model) for model in models] == [False, allowed]
        found.append(losses)
    assert_same(*found, 0.0, "")


@on_ranks(2)
def test_parts_of_tensors_are_left_alone(rank: int, world: int) -> Any:
    def run(model: Any) -> Any:
        losses = fit(model)
        value = model.layers[2].kernel._value
        model.layers[2].kernel._value = type(value)(value.data)  # over the same memory
        return losses + fit(model)

    with strategy() as made:
        model = model_of(made, optimizers.SGD(0.1))
        model.build((None, 6, 7))
        value = model.layers[2].kernel._value
        value.data = value.data.repeat(1, 2)[:, ::2]
        fit(model)
        assert not is_sharded(made, model)
    return with_and_without(run, OPTIMIZERS["SGD"])


def dies_in_update(rank: int, world: int) -> str:
    class Dying(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 1 and rank == 1:
                self.model.optimizer._parallel_update_step = lambda *_: os.kill(
                    os.getpid(), signal.SIGKILL
                )

    with strategy() as made:
        return error_of(fit, model_of(made, optimizers.SGD(0.1)), Dying())


def test_a_rank_that_dies_in_its_update_is_named(rank_pools: Any) -> None:
    with first_ranks(rank_pools, "torch", 2).start(dies_in_update) as ranks:
        text = ranks[0].result()
    assert "PeerLostError: [rank 0 in group keras (ranks 0, 1)] barrier" in text
    assert "rank 1 ended unexpectedly" in text
    assert "weights are partly of this step, and partly of the one before" in text
