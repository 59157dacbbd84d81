"""BatchNormalization(synchronized=True): moments over all ranks' rows of a batch.

Keras asks TensorFlow's distribution strategy for sums over ranks there, and none is active. A rank
without rows adds nothing. The gradient of a sum over ranks is a sum over ranks, too: of what each
rank's loss makes of it, as much as that loss counts in the mean over ranks.
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
    """Have Keras' synchronized moments look for a running step, and else stay as they are."""
    keras_internals.wrap_once(keras_internals.backend_nn, "moments", _over_all_rows)


def _over_all_rows(of_this_rank: Callable[..., Any]) -> Callable[..., Any]:
    def moments(x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False) -> Any:
        step = running_step()
        if step is None or not synchronized:
            return of_this_rank(x, axes, keepdims, synchronized)
        dtype = x.dtype
        x = ops.cast(x, keras.backend.result_type(dtype, "float32"))  # squares of 16 bits overflow
        ours = [ops.sum(values, axes, keepdims=keepdims) for values in (x, x * x, ops.ones_like(x))]
        first, second, count = step.backend.total_with_gradient(
            [step.shard.times(values, 1) for values in ours], step.shard
        )
        mean = ops.divide_no_nan(first, count)
        variance = ops.maximum(ops.divide_no_nan(second, count) - mean * mean, 0.0)
        return ops.cast(mean, dtype), ops.cast(variance, dtype)

    return moments


def weighted_gradient(
    upstream: Sequence[Any], shard: BatchShard, total: Callable[[Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """The gradient of a sum over ranks, of a loss that is their mean weighted by their shards.

    What a rank makes of it is multiplied by its weight afterwards, with all of its gradients; so it
    is divided by that here.
    """
    everyones = total([shard.times(gradient, shard.weight) for gradient in upstream])
    return [ops.divide_no_nan(each, ops.cast(shard.weight, each.dtype)) for each in everyones]
