"""Layers, losses and metrics like those that programs define themselves."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from stress.keras.layers import IDS


class Subclassed(keras.Model):
    """A model that is built by its first call."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class ScaleAndShift(layers.Layer):
    """Two variables with the shape of the features; the second is expanded twice."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.offset = self.add_weight(shape=(shape[-1],), initializer="random_normal")

    def call(self, x: Any) -> Any:
        offset = ops.reshape(ops.expand_dims(self.offset, 0), (1,) * (len(x.shape) - 1) + (-1,))
        return x * self.factor + offset


class ExpandedPosition(layers.Layer):
    """A variable for each step and feature, added to all rows."""

    def __init__(self, axis: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.axis = axis

    def build(self, shape: Any) -> None:
        self.position = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, x: Any) -> Any:
        return x + ops.expand_dims(self.position, self.axis)


class _Matrix(layers.Layer):
    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(**options)
        self.units = units


class ReshapedWeight(_Matrix):
    """A matrix that is stored as a vector."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1] * self.units,), initializer="random_normal")

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.reshape(self.kernel, (x.shape[-1], self.units)))


class TransposedWeight(_Matrix):
    """A matrix that is stored transposed."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(self.units, shape[-1]))

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(self.kernel))


class SplitWeight(_Matrix):
    """Two matrices that are stored as one."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 2 * self.units))

    def call(self, x: Any) -> Any:
        value, gate = ops.split(ops.convert_to_tensor(self.kernel), 2, axis=1)
        return ops.matmul(x, value) * ops.sigmoid(ops.matmul(x, gate))


class BroadcastWeight(layers.Layer):
    """A variable for each feature, broadcast to the other axes."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(1, shape[-1]), initializer="ones")

    def call(self, x: Any) -> Any:
        return x * ops.broadcast_to(ops.squeeze(self.factor, 0), x.shape[1:])


class PositionEmbedding(layers.Layer):
    """An embedding of positions, whose ids all rows and all ranks share."""

    def build(self, shape: Any) -> None:
        self.embedding = layers.Embedding(shape[1] + 2, shape[2])
        self.embedding.build(None)

    def call(self, x: Any) -> Any:
        return x + self.embedding(ops.arange(x.shape[1]))


class TiedEmbedding(layers.Layer):
    """A variable with a sparse gradient and a dense one."""

    def __init__(self, output_dim: int, **options: Any) -> None:
        name = options.pop("name", None)
        super().__init__(name=name)
        self.embedding = layers.Embedding(IDS, output_dim, **options)
        self.dense = layers.Dense(output_dim, "tanh")

    def build(self, shape: Any) -> None:
        self.embedding.build(shape)
        self.dense.build((*shape, self.embedding.output_dim))

    def call(self, ids: Any) -> Any:
        table = ops.convert_to_tensor(self.embedding.embeddings)
        return ops.matmul(self.dense(self.embedding(ids)), ops.transpose(table))


def squares(y_true: Any, y_pred: Any) -> Any:
    """A loss with a number for each row."""
    return ops.mean(ops.square(ops.cast(y_true, y_pred.dtype) - y_pred), axis=-1)


class Quartic(keras.losses.Loss):
    """A loss with a number for each row."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean((y_true - y_pred) ** 4, axis=-1)


def spread(y_true: Any, y_pred: Any) -> Any:
    """A metric with one number for a batch that is not a function of its parts' numbers."""
    return ops.max(y_pred) - ops.min(y_pred)


class Maximum(keras.metrics.Metric):
    """A metric whose states cannot be summed."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.maximum = self.add_variable((), "zeros", name="maximum")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        value = ops.cast(ops.max(y_pred), self.maximum.dtype)
        self.maximum.assign(ops.maximum(self.maximum, value))

    def result(self) -> Any:
        return self.maximum + 0


class WeighedSum(keras.metrics.Metric):
    """A metric whose states can be summed, unknown to the plug-in."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        values = ops.cast(
            ops.sum(y_pred, axis=tuple(range(1, len(y_pred.shape)))), self.total.dtype
        )
        if sample_weight is not None:
            weight = ops.cast(sample_weight, values.dtype)
            axes = tuple(range(1, len(weight.shape)))
            values *= ops.sum(weight, axis=axes) if axes else weight
        self.total.assign_add(ops.sum(values))

    def result(self) -> Any:
        return self.total + 0
