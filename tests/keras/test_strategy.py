"""The strategy itself: its scope, what it tells, how steps communicate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from sdp_plugins.keras import SMDDPStrategy
from tests.keras.first_ranks import BACKENDS, assert_same, on_ranks
from tests.keras.models import BATCH, ROWS, arrays, crossentropy, dense, unbuilt
from tests.keras.strategies import compiled, logged, strategy, values

# ---- scope -----------------------------------------------------------------------------------


@on_ranks(2, BACKENDS)
def test_scope_may_be_entered_again(rank: int, world: int) -> None:
    with strategy() as made:
        with made.scope(), made.scope():
            model = dense()
            model.compile("sgd", crossentropy())
        model.fit(*arrays(), verbose=0)
        other = dense()
        other.compile("sgd", crossentropy())
        assert "train_step" in vars(model)
        assert "train_step" not in vars(other)


@on_ranks(2, BACKENDS)
def test_compiled_again(rank: int, world: int) -> list[Any]:
    """A second compile, outside of the scope, keeps the model with its strategy."""
    with strategy() as made:
        model = compiled(made)
        model.fit(*arrays(), verbose=0)
        model.compile("adam", crossentropy())
        model.fit(*arrays(), shuffle=True, verbose=0)
        return values(model)


@pytest.mark.versions
@on_ranks(2)
def test_a_model_outside_is_warned_of(rank: int, world: int) -> None:
    """Compiled under a strategy, but in no scope; and after it."""
    with logged() as lines:
        with strategy() as made:
            compiled(made).compile("adam", "mse")  # knows its strategy
            model = keras.Sequential([keras.Input((6,)), layers.Dense(3)], name="alone")
            model.compile("sgd", "mse")
            model.predict(arrays()[0], verbose=0)
            assert not lines
            for _ in range(2):
                model.fit(arrays()[0], np.zeros((ROWS, 3)), verbose=0)
        other = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        other.compile("sgd", "mse")
        other.fit(arrays()[0], np.zeros((ROWS, 3)), verbose=0)
    (line,) = lines
    assert "'alone' was compiled outside of strategy.scope(): fit() trains it" in line


class Overrides(keras.Sequential):
    """Has arguments of its own, as the models of KerasHub."""

    def fit(self, x: Any, y: Any, scale: float, **options: Any) -> Any:
        return super().fit(x * scale, y, **options)

    def evaluate(self, x: Any, y: Any, scale: float | None = None, **options: Any) -> Any:
        x = x if scale is None else x * scale  # None: `fit` validates
        return super().evaluate(x, y, **options)

    def predict(self, x: Any, scale: float) -> Any:
        return super().predict(x * scale, verbose=0)

    def train_on_batch(self, x: Any, y: Any, scale: float) -> Any:
        return super().train_on_batch(x * scale, y)


@pytest.mark.versions
@on_ranks(2, BACKENDS)
def test_overridden_methods(rank: int, world: int) -> list[Any]:
    with strategy() as made:
        results = []
        for kind in (Overrides, keras.Sequential):
            keras.utils.set_random_seed(3)
            with made.scope():
                model = kind([keras.Input((6,)), layers.Dense(3)])
                model.compile("sgd", crossentropy())
            x, y = arrays()
            own: Any = {"scale": 3.0} if kind is Overrides else {}
            options: Any = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
            options |= {"validation_data": (x[:9], y[:9])}
            x = x if own else x * 3.0
            history = model.fit(x, y, **own, **options)
            results.append(
                [
                    history.history,
                    model.evaluate(x, y, verbose=0, **own),
                    model.train_on_batch(x, y, **own),
                    model.predict(x, **own or {"verbose": 0}),
                ]
            )
    assert_same(results[0], results[1], 1e-5, "")
    return results


# ---- what it tells ---------------------------------------------------------------------------


@on_ranks(2)
def test_rank_0_logs_that_it_is_in_use(rank: int, world: int) -> None:
    """And a warning of Keras' own names the line that it is about."""
    import torch

    data, text = torch.utils.data.TensorDataset(*map(torch.from_numpy, arrays())), "will be ignored"
    with logged() as lines, strategy() as made, pytest.warns(match=text) as caught:
        compiled(made).fit(torch.utils.data.DataLoader(data, BATCH), verbose=0)
    told = [
        "fit: smddp trains model 'sequential' on 2 ranks",
        "model 'sequential': each rank updates a shard of the weights",
    ]
    assert lines == (told if rank == 0 else [])
    files = [Path(each.filename).name for each in caught if text in str(each.message)]
    assert files == ["epoch_iterator.py"]


@on_ranks(1)
def test_works_without_a_launcher(rank: int, world: int) -> None:
    with logged() as lines, strategy() as made:
        model = compiled(made)
        model.fit(*arrays(), batch_size=BATCH, verbose=0)
        assert len(model.predict(arrays()[0], verbose=0)) == len(arrays()[0])
        assert made.num_replicas_in_sync == 1
    (line,) = lines
    assert "one rank only" in line


@on_ranks(2, ["tensorflow"])
def test_xla_is_undone(rank: int, world: int) -> float:
    """Of a model that was to be compiled by it."""
    with logged() as lines, strategy() as made:
        model = compiled(made, jit_compile=True)
        history = model.fit(*arrays(), batch_size=BATCH, shuffle=False, verbose=0)
        model.evaluate(*arrays(), verbose=0)
        assert not model.jit_compile
    assert sum("jit_compile=True is undone" in line for line in lines) == 1
    return history.history["loss"][0]


# ---- steps -----------------------------------------------------------------------------------


@on_ranks(2, ["tensorflow"])
def test_shares_of_a_batch_are_exact_in_float64(rank: int, world: int) -> None:
    """The graph learns the number of rows in each step; 1/3 in float32 would be off by 1e-8."""
    import tensorflow as tf

    x, y = np.array([[1.0], [2.0], [4.0]]), np.array([[3.0], [5.0], [7.0]])
    signature = (tf.TensorSpec((None, 1), tf.float64), tf.TensorSpec((None, 1), tf.float64))
    data = tf.data.Dataset.from_generator(lambda: iter([(x, y)]), output_signature=signature)
    with strategy() as made:
        with made.scope():
            layer = layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="float64")
            model = keras.Sequential([keras.Input((1,), dtype="float64"), layer])
            model.compile(keras.optimizers.SGD(1.0), keras.losses.MeanSquaredError(dtype="float64"))
        model.fit(data, verbose=0)
    kernel = ops.convert_to_numpy(layer.kernel)
    assert kernel.item() == pytest.approx(2 / 3 * float((x * y).sum()), rel=1e-14)


@contextmanager
def without_native_ops() -> Iterator[None]:
    """As in a process that has loaded none, and must not."""
    if keras.backend.backend() == "jax":
        from sdp_plugins.jax import collectives as module

        name = "register"
    else:
        from sdp_plugins.tensorflow import operations as module

        name = "all_reduce"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SDP_NATIVE_OPS", "0")
        patch.setattr(module, name, getattr(module, name).__wrapped__)
        yield


@pytest.mark.versions
@pytest.mark.parametrize("native", [False, True])
@on_ranks(2, ["tensorflow", "jax"])
def test_with_and_without_native_operations(rank: int, world: int, native: bool) -> None:
    with nullcontext() if native else without_native_ops(), strategy() as made:
        compiled(made).fit(*arrays(17), batch_size=BATCH, verbose=0)
        assert (made._context.backend._collectives._endpoint is not None) is native


class Batches(keras.utils.PyDataset):
    """The arrays' batches; notes what it was asked for."""

    def __init__(self, rows: int = 40) -> None:
        super().__init__()
        self.x, self.y = arrays(rows)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x) // BATCH

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self.x[rows], self.y[rows]


class Communicates(keras.callbacks.Callback):
    """Where a step may be under way."""

    def __init__(self, made: SMDDPStrategy) -> None:
        super().__init__()
        self.made = made

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        total = ops.convert_to_numpy(self.made.all_reduce(np.ones(3, np.float32), "sum"))
        assert total.tolist() == [2.0, 2.0, 2.0]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.predict(arrays()[0], verbose=0)


@on_ranks(2, BACKENDS)
def test_the_host_communicates_between_steps(rank: int, world: int) -> list[float]:
    """While JAX's steps may be under way; wide, so that they take a while."""
    with strategy() as made:
        model = compiled(made, layers.Dense(1500), layers.Dense(1500))
        model.fit(
            Batches(),
            validation_data=Batches(),
            callbacks=[Communicates(made)],
            epochs=3,
            shuffle=False,
            verbose=0,
        )
        return [float(ops.convert_to_numpy(v).sum()) for v in model.trainable_variables]


@on_ranks(2, BACKENDS)
def test_a_dataset_is_shuffled_alike(rank: int, world: int) -> list[list[int]]:
    """By default, with other random numbers on every rank; anew in every epoch."""
    with strategy() as made:
        model, data, epochs = compiled(made), Batches(), []
        seen = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: epochs.append([*data.read])
        )
        model.fit(data, epochs=3, verbose=0, callbacks=[seen])
    read = [epochs[0], *(b[len(a) :] for a, b in pairwise(epochs))]
    orders = [epoch[-5:] for epoch in read]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    return orders


@on_ranks(2, BACKENDS)
def test_weights_that_one_rank_has_loaded(rank: int, world: int) -> list[float]:
    """All ranks take rank 0's at the first call, and at each `fit`."""
    with strategy() as made:
        x, y = arrays()
        model, losses = compiled(made, optimizer=keras.optimizers.SGD(0.0)), []
        for call in (model.evaluate, model.fit):
            if rank == 0:
                model.set_weights([np.zeros_like(each) for each in model.get_weights()])
            call(x, y, verbose=0)
            assert np.abs(model.predict(x, verbose=0)).max() == 0.0
            losses.append(float(model.evaluate(x, y, verbose=0)[0]))
            if call == model.evaluate:
                model.set_weights([each + 1.0 for each in model.get_weights()])  # on all ranks
                losses.append(float(model.train_on_batch(x, y)[0]))
    assert losses[::2] == pytest.approx([np.log(3)] * 2, rel=1e-5)
    return losses


@on_ranks(2, BACKENDS)
def test_a_prediction_is_the_first_call(rank: int, world: int) -> list[Any]:
    """Of a model whose loss and metrics are not built, nor, in one case, its layers."""
    with strategy() as made:
        with made.scope():
            models = dense(), unbuilt(), unbuilt()
            for model in models:
                model.compile("sgd", crossentropy(), metrics=["accuracy"])
        first, second, third = models
        x, _ = arrays()
        return [
            first.predict(x, verbose=0),
            second.predict(x, verbose=0),
            third.predict_on_batch(x),
        ]


# ---- accumulated gradients -------------------------------------------------------------------


class Scale(layers.Layer):
    """Has a weight that is one number."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x: Any) -> Any:
        return x * self.scale


@on_ranks(2, BACKENDS)
def test_an_accumulation_goes_on_in_the_next_epoch(rank: int, world: int) -> list[Any]:
    with strategy() as made:
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
        model = compiled(made, Scale(), optimizer=optimizer)
        model.fit(*arrays(3 * BATCH), batch_size=BATCH, epochs=3, verbose=0)
        return values(model)


def accumulated_over_three_fits(rank: int, world: int) -> list[Any]:
    """Three steps each, of which four make an update."""
    with strategy() as made:
        keras.utils.set_random_seed(1)
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
        model = compiled(made, optimizer=optimizer)
        x, y = arrays(21)
        for _ in range(3):
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        return values(model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_accumulate_from_fit_to_fit(keras_pool: Any, backend: str) -> None:
    (alone,) = keras_pool(backend, 1).run(accumulated_over_three_fits)
    ranks = keras_pool(backend, 2).run(accumulated_over_three_fits)
    for mine, other, expected in zip(*ranks, alone, strict=True):
        np.testing.assert_array_equal(mine, other)
        if mine.dtype.kind == "f":  # the others are counters, and random states of one rank's own
            np.testing.assert_allclose(mine, expected, atol=2e-5)


@on_ranks(2, BACKENDS)
@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="newer Keras has it")
def test_several_optimizers_in_one(rank: int, world: int) -> list[Any]:
    with strategy() as made:
        kinds = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
        kinds[".*bias"] = keras.optimizers.Adam(0.1)
        model = compiled(made, optimizer=keras.optimizers.MultiOptimizer(kinds))
        model.fit(*arrays(), batch_size=BATCH, shuffle=False, verbose=0)
        model.train_on_batch(*arrays())
        return values(model)


@on_ranks(2, ["tensorflow"])
def test_two_inputs_in_a_tuple_of_one(rank: int, world: int) -> list[Any]:
    """The second input is not taken for the labels."""
    import tensorflow as tf

    ones = np.ones((8, 3), np.float32)
    with strategy() as made, made.scope():
        inputs = [keras.Input((3,)), keras.Input((3,))]
        model = keras.Model(inputs, layers.Subtract()(inputs))
        model.compile("sgd", "mse")
        rows = tf.data.Dataset.from_tensor_slices(((2 * ones, ones),)).batch(4)
        found = model.predict(rows, verbose=0)
    assert (found == ones).all()
    return [found]
