"""Data, models, layers and metrics of the cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

ROWS, FEATURES, CLASSES = 24, 6, 3
BATCH = 8
TOKENS = 20


def arrays(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and which class each is of."""
    random = np.random.default_rng(3)
    x = random.normal(size=(rows, FEATURES)).astype(np.float32)
    y = (x @ random.normal(size=(FEATURES, CLASSES))).argmax(axis=1).astype(np.int32)
    return x, y


def one_hot(rows: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = arrays(rows)
    return x, np.eye(CLASSES, dtype=np.float32)[y]


def tokens(rows: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(5).integers(0, TOKENS, (rows, FEATURES)).astype(np.int32)
    return x, arrays(rows)[1]


def masked_tokens(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """A class for each token, of which a mask leaves a different share on every rank."""
    x, _ = tokens(rows)
    for row in range(len(x)):
        x[row, : row % FEATURES] = 0
    return x, x % CLASSES


def two_targets(rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
    x, y = arrays(rows)
    return {"x": x}, {"kind": y, "size": x[:, :1]}


def crossentropy(**options: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


# ---- layers and metrics ----------------------------------------------------------------------


class Positions(layers.Layer):
    """Embeds tokens and their positions by one table: ids of the rows, and ids of all rows."""

    def __init__(self, tokens: bool = True) -> None:
        super().__init__()
        self.table = layers.Embedding(TOKENS, 4)
        self.tokens = tokens

    def build(self, shape: Any) -> None:
        self.table.build(shape)

    def call(self, x: Any) -> Any:
        positions = self.table(ops.arange(ops.shape(x)[1]))
        return positions + (self.table(x) if self.tokens else ops.cast(x[..., None], "float32"))


class Position(layers.Layer):
    """Adds a vector by a view: of one row its gradient is a view of the one that is passed on."""

    def __init__(self, by_reshape: bool = False) -> None:
        super().__init__()
        self.by_reshape = by_reshape

    def build(self, shape: Any) -> None:
        self.position = self.add_weight(shape=(shape[-1],), initializer="ones", name="position")

    def call(self, x: Any) -> Any:
        if self.by_reshape:
            return x + ops.reshape(self.position, (1, -1))
        return x + ops.expand_dims(self.position, 0)


class Masking(layers.Layer):
    """Adds a state of its own, which nobody changes and of which there are no differences."""

    def build(self, shape: Any) -> None:
        self.mask = self.add_weight(
            shape=(shape[-1],),
            trainable=False,
            initializer=lambda shape, dtype=None: ops.convert_to_tensor(
                [0.0] * (shape[0] - 1) + [-np.inf], dtype
            ),
        )

    def call(self, x: Any) -> Any:
        return ops.relu(x + self.mask)


class Peak(keras.metrics.Metric):
    """The largest prediction so far: its state does not add up."""

    def __init__(self, name: str = "peak") -> None:
        super().__init__(name=name)
        self.peak = self.add_variable((), "zeros", name="peak")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.peak.assign(ops.maximum(self.peak, ops.max(y_pred)))

    def result(self) -> Any:
        return self.peak + 0


class RootMean(keras.metrics.Mean):
    """What it makes of a batch is not the mean of what it makes of the parts."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(ops.sqrt(ops.mean(ops.square(y_pred))))


class Latest(keras.metrics.Metric):
    """Keeps the last number that it was told."""

    def __init__(self) -> None:
        super().__init__(name="latest")
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, value: Any) -> None:
        self.value.assign(value)

    def result(self) -> Any:
        return ops.convert_to_tensor(self.value)


def spread(y_true: Any, y_pred: Any) -> Any:
    """A metric that is a function."""
    return ops.max(y_pred) - ops.min(y_pred)


def squares(y_true: Any, y_pred: Any) -> Any:
    """A loss that is a function."""
    return ops.mean(ops.square(ops.one_hot(y_true, CLASSES) - y_pred), axis=-1)


# ---- models ----------------------------------------------------------------------------------


def dense(*more: Any) -> Any:
    """A small classifier."""
    return keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(8, "tanh"), *more, layers.Dense(CLASSES)]
    )


def unbuilt() -> Any:
    return keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(CLASSES)])


def embedding(*more: Any, mask_zero: bool = True) -> Any:
    return keras.Sequential(
        [
            keras.Input((FEATURES,), dtype="int32"),
            layers.Embedding(TOKENS, 4, mask_zero=mask_zero),
            *more,
            layers.Dense(CLASSES),
        ]
    )


def shared_ids(tokens: bool = True) -> Any:
    return keras.Sequential(
        [
            keras.Input((FEATURES,), dtype="int32"),
            Positions(tokens),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )


def two_outputs() -> Any:
    x = keras.Input((FEATURES,), name="x")
    h = layers.Dense(8, "tanh")(x)
    return keras.Model(
        {"x": x},
        {"kind": layers.Dense(CLASSES, name="kind")(h), "size": layers.Dense(1, name="size")(h)},
    )


def regularized() -> Any:
    activity = keras.regularizers.L2(0.1)
    return dense(layers.Dense(5, kernel_regularizer="l2", activity_regularizer=activity))


def frozen() -> Any:
    model = dense(layers.Dense(4, name="frozen"))
    model.get_layer("frozen").trainable = False
    return model


def half_precision() -> Any:
    keras.config.set_dtype_policy("mixed_float16")
    return dense()


def views_of_one_row() -> Any:
    return dense(
        Position(), layers.Dense(8), layers.GroupNormalization(4), Position(by_reshape=True)
    )


def own_backward_pass() -> Any:
    class Model(keras.Sequential):
        def train_step(self, *args: Any) -> Any:
            return super().train_step(*args)

    return Model([views_of_one_row()])


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = layers.Dense(8, "tanh"), layers.Dense(CLASSES)

    def call(self, x: Any) -> Any:
        return self.outer(self.inner(x))


class TellsMetric(keras.Model):
    """A metric of the program's own is told of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()
        self.latest = Latest()

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.latest.update_state(loss)
        return loss


# ---- train_step as in the guides -------------------------------------------------------------


class OwnStep(Subclassed):
    """With a metric of its own and a value that none keeps."""

    def __init__(self, take_gradients: Callable[..., Any], in_dictionary: bool) -> None:
        super().__init__()
        self.take_gradients = take_gradients
        self.own_loss = keras.metrics.Mean(name="own_loss")
        self.own = {"a": keras.optimizers.SGD(0.1)} if in_dictionary else {}

    def train_step(self, data: Any) -> Any:
        x, y = data
        loss, gradients = self.take_gradients(self, x, y)
        optimizer = self.own["a"] if self.own else self.optimizer
        optimizer.apply(gradients, self.trainable_variables)
        self.own_loss.update_state(loss, sample_weight=ops.shape(x)[0])
        mean = self.own_loss.result()
        return {"own_loss": mean, "by_another_name": mean, "raw": loss}

    @property
    def metrics(self) -> Any:
        return [self.own_loss]

    def test_step(self, data: Any) -> Any:
        x, y = data
        self.own_loss.update_state(self.compute_loss(x, y, self(x)), sample_weight=ops.shape(x)[0])
        return {"own_loss": self.own_loss.result()}


def gradients_of_tensorflow(model: Any, x: Any, y: Any) -> Any:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True))
    return loss, tape.gradient(loss, model.trainable_variables)


def gradients_of_torch(model: Any, x: Any, y: Any) -> Any:
    model.zero_grad()
    loss = model.compute_loss(x, y, model(x, training=True))
    loss.backward()
    return loss.detach(), [variable.value.grad for variable in model.trainable_variables]


class OwnStepOfJax(Subclassed):
    def train_step(self, state: Any, data: Any) -> Any:
        import jax

        trainable, others, optimizer, metrics = state
        x, y = data

        def loss_of(trainable: Any) -> Any:
            y_pred, updated = self.stateless_call(trainable, others, x)
            return self.compute_loss(x, y, y_pred), updated

        (loss, updated), grads = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        return {"raw": loss}, (trainable, updated, optimizer, metrics)


def own_step(in_dictionary: bool = False) -> Any:
    """Its optimizer may be in a dictionary, and so no attribute of the model."""
    if keras.backend.backend() == "jax":
        return OwnStepOfJax()
    on_torch = keras.backend.backend() == "torch"
    return OwnStep(gradients_of_torch if on_torch else gradients_of_tensorflow, in_dictionary)
