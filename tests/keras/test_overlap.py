"""Gradients are averaged while the backward pass goes on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
from keras import layers

from tests.faults import die
from tests.keras.first_ranks import assert_same, first_ranks, on_ranks
from tests.keras.strategies import error_of, strategy, values

SMALL_BUFFERS = {"SDP_FUSION_MB": "1"}
WIDTH = 600  # each kernel is more than a fusion buffer of 1 MiB holds
Function = Callable[[], Any]


def host_function(function: Function) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        function()
        return np.float32(0)

    return call


def after(function: Function, tensor: Any) -> Any:
    """The tensor, once a function on the host was called; in a compiled step."""
    if keras.backend.backend() == "jax":
        import jax

        zero = jax.ShapeDtypeStruct((), np.float32)
        return tensor + jax.pure_callback(host_function(function), zero, tensor[0, 0])
    import tensorflow as tf

    call = host_function(function)
    return tensor + tf.numpy_function(call, [tensor[0, 0]], tf.float32, stateful=False)


def calling(during_backward: Function) -> Callable[[Any], Any]:
    """The identity; its backward pass calls a function."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        identity = jax.custom_vjp(lambda x: x)
        identity.defvjp(lambda x: (x, None), lambda _, grad: (after(during_backward, grad),))
        return identity
    if backend == "tensorflow":
        import tensorflow as tf

        def call(x: Any) -> Any:
            return tf.identity(x), lambda grad: after(during_backward, grad)

        return tf.custom_gradient(call)
    import torch

    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            during_backward()
            return grad

    return Call.apply


class Calling(layers.Layer):
    """See `calling`."""

    def __init__(self, during_backward: Function) -> None:
        super().__init__()
        self._call = calling(during_backward)

    def call(self, x: Any) -> Any:
        return self._call(x)


class Watched(keras.optimizers.SGD):
    """Calls a function when it has the last layer's gradient."""

    def __init__(self, function: Function) -> None:
        super().__init__(0.01)
        self._function = function

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if "last/kernel" in getattr(variable, "path", variable.name):
            gradient = after(self._function, gradient)
        super().update_step(gradient, variable, learning_rate)


def deep(
    made: Any, during_backward: Function, optimizer: Any, kind: type = keras.Sequential
) -> Any:
    """Some layers; a function is called before the backward pass of the first one.

    The more layers, the less it matters what a compiler makes of the order.
    """
    between = [layers.Dense(WIDTH) for _ in range(4)]
    with made.scope():
        model = kind(
            [
                keras.Input((WIDTH,)),
                layers.Dense(WIDTH),
                Calling(during_backward),
                *between,
                layers.Dense(WIDTH, name="last"),
            ]
        )
        model.compile(optimizer, "mse")
    return model


def train(model: Any) -> None:
    random = np.random.default_rng(1)
    x, y = random.random((2, 4, WIDTH), np.float32)
    model.fit(x, y, batch_size=4, verbose=0)


def watched(function: Function) -> Any:
    """Have a function called as soon as there is an average; JAX updates after all of them."""
    if keras.backend.backend() != "jax":
        return nullcontext()
    from sdp_plugins.jax.collectives import JaxCollectives

    reduce = JaxCollectives._bucket

    def reduce_watched(self: Any, arrays: Any, op: str, turn: Any) -> Any:
        results = list(reduce(self, arrays, op, turn))
        if op == "avg" and results[0].ndim == 2:
            results[0] = after(function, results[0])
        return results

    return mock.patch.object(JaxCollectives, "_bucket", reduce_watched)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="what waits takes the only thread")
@on_ranks(2, ["tensorflow", "jax"], SMALL_BUFFERS)
def test_compiled_steps_overlap(rank: int, world: int) -> None:
    """There is the last layer's average while the first layer waits for that."""
    arrived = threading.Event()
    seen: list[bool] = []
    with strategy() as made, watched(arrived.set):
        optimizer: Any = "sgd" if keras.backend.backend() == "jax" else Watched(arrived.set)
        train(deep(made, lambda: seen.append(arrived.wait(200)), optimizer))
    assert seen == [True]


class OwnStep(keras.Sequential):
    def train_step(self, *args: Any) -> Any:
        return super().train_step(*args)


def not_sharded() -> Any:
    """An optimizer that needs all gradients on each rank."""
    return keras.optimizers.SGD(0.01, clipnorm=1e6)


def overlapping(kind: type, wait_s: float) -> tuple[list[bool], list[Any]]:
    """Whether the last layer's gradient becomes the average while the first layer waits for that.

    And the values afterwards.
    """
    own: list[Any] = []
    seen: list[bool] = []

    def wait_for_average() -> None:
        end = time.monotonic() + wait_s
        while (same := bool((kernel.grad == own[0]).all())) and time.monotonic() < end:
            time.sleep(0.01)
        seen.append(not same)

    with strategy() as made:
        model = deep(made, wait_for_average, not_sharded(), kind)
        kernel = model.get_layer("last").kernel.value
        kernel.register_post_accumulate_grad_hook(lambda it: own.append(it.grad.clone()))
        train(model)
        return seen, values(model)


@on_ranks(2, environment=SMALL_BUFFERS)
def test_torch_overlaps(rank: int, world: int) -> list[Any]:
    """But not a step of one's own, which may have several backward passes; with the same result."""
    overlapped, found = overlapping(keras.Sequential, 100.0)
    assert overlapped == [True]
    own_step, same = overlapping(OwnStep, 0.5)
    assert own_step == [False]
    assert_same(found, same, 0.0, "")
    return found


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2, environment=SMALL_BUFFERS)
def test_gradients_on_some_ranks_only_are_named(rank: int, world: int, sharded: bool) -> None:
    """Of a layer that is used or not as a rank's data will have it."""

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.seldom = layers.Dense(1), layers.Dense(1, name="seldom")

        def build(self, shape: Any) -> None:
            self.always.build(shape)
            self.seldom.build(shape)

        def call(self, x: Any) -> Any:
            y = self.always(x)
            return y + self.seldom(x) if x.device.type == "cpu" and x.sum() > 0 else y

    with strategy() as made:
        with made.scope():
            model = Model()
            model.compile("sgd" if sharded else not_sharded(), "mse")
        x = np.repeat(np.array([[1.0], [-1.0]], np.float32), 2, axis=0)  # rank 0's; rank 1's
        text = error_of(lambda: model.fit(x, x, batch_size=4, shuffle=False, verbose=0))
    assert "model/seldom/bias' got a gradient on some ranks only" in text, text


@on_ranks(2, ["tensorflow"])
def test_layers_of_some_ranks_only_are_named(rank: int, world: int) -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layers_of_ranks = [layers.Dense(1, name=f"of_rank_{r}") for r in range(2)]

        def build(self, shape: Any) -> None:
            for layer in self.layers_of_ranks:
                layer.build(shape)

        def call(self, x: Any) -> Any:
            return self.layers_of_ranks[rank](x)

    with strategy() as made:
        with made.scope():
            model = Model()
            model.compile("sgd", "mse")
        x = np.ones((4, 1), np.float32)
        text = error_of(lambda: model.fit(x, x, batch_size=4, verbose=0))
    assert "/of_rank_0/kernel' has a gradient; rank 1: 'model" in text, text


def dies_in_backward(rank: int, world: int, sharded: bool) -> str:
    optimizer = keras.optimizers.SGD(0.01) if sharded else not_sharded()
    with strategy() as made:
        model = deep(made, die if rank == 1 else time.monotonic, optimizer)
        return error_of(train, model)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_rank_that_dies_in_its_backward_pass_is_named(rank_pools: Any, sharded: bool) -> None:
    pool = first_ranks(rank_pools, "torch", 2)
    pool.environment = SMALL_BUFFERS
    with pool.start(dies_in_backward, sharded) as ranks:
        text = ranks[0].result()
    assert "PeerLostError: [rank 0 in group keras (ranks 0, 1)] all_reduce" in text
    assert "rank 1 ended unexpectedly" in text
