"""BatchNormalization(synchronized=True): moments over all ranks' rows of a batch.

For these moments Keras asks TensorFlow's distribution strategy for sums over ranks, but no such
strategy is active. A rank without rows adds zeros. The gradient of a sum over ranks is also a
sum over ranks: of each rank's gradient, with the weight of its loss in the mean over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
from keras import ops

from . import keras_internals
from .running_step import running_step

if TYPE_CHECKING:
    from .batch_shard import BatchShard


def install() -> None:
    """Make Keras' synchronized moments use the running step; without one they are unchanged."""
    keras_internals.wrap_once(keras_internals.backend_nn, "moments", _over_all_rows)


def _over_all_rows(of_this_rank: Callable[..., Any]) -> Callable[..., Any]:
    def moments(x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False) -> Any:
        step = running_step()
        if step is None or not synchronized:
            return of_this_rank(x, axes, keepdims, synchronized)
        dtype = x.dtype
        x = ops.cast(x, keras.backend.result_type(dtype, "float32"))  # squares overflow in 16 bits
        ours = [ops.sum(values, axes, keepdims=keepdims) for values in (x, x * x, ops.ones_like(x))]
        first, second, count = step.backend.all_reduce_with_gradient(
            [step.shard.times(values, 1) for values in ours], step.shard
        )
        mean = ops.divide_no_nan(first, count)
        variance = ops.maximum(ops.divide_no_nan(second, count) - mean * mean, 0.0)
        return ops.cast(mean, dtype), ops.cast(variance, dtype)

    return moments


def weighted_gradient(
    upstream: Sequence[Any], shard: BatchShard, total: Callable[[Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """Return the gradient of a sum over ranks, for a loss that is the weighted mean over shards.

    All gradients of a rank are later multiplied by its weight, so this gradient is divided by it.
    """
    everyones = total([shard.times(gradient, shard.weight) for gradient in upstream])
    return [ops.divide_no_nan(each, ops.cast(shard.weight, each.dtype)) for each in everyones]
