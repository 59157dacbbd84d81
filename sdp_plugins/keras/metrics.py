"""Metrics of the whole batch.

The state of Keras' own metrics is a sum over rows, so that of a batch is the sum over ranks. Means
and sums that are told one number for a batch, such as its loss, count it as much as this rank's
shard. What a program's own metrics do with a batch is unknown: they are given all ranks' rows, and
of one number for a batch the ranks' mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from keras import ops
from keras.losses import Loss
from keras.metrics import Mean, Sum

from . import keras_internals
from .losses import relates_rows

if TYPE_CHECKING:
    from .backends import Backend
    from .batch_shard import BatchShard

_Update = Callable[..., Any]


def flat(model: Any) -> list[Any]:
    """All metrics of a model, each once."""
    found: dict[int, Any] = {}
    for metric in model.metrics:
        parts = metric.metrics if isinstance(metric, keras_internals.CompileMetrics) else [metric]
        found.update((id(part), part) for part in parts)
    return list(found.values())


def adds_up(metric: Any) -> bool:
    """Whether the state after a batch is the sum of the states after its parts."""
    function = getattr(metric, "_fn", None)  # of a MeanMetricWrapper
    if function is not None and (
        not keras_internals.is_of_keras(function) or isinstance(function, Loss)
    ):
        return False  # of a loss object there is one number for a batch
    if not keras_internals.is_of_keras(type(metric).update_state):
        return False
    if function is not None and relates_rows(function, metric._fn_kwargs):
        return False
    return any(
        keras_internals.is_of_keras(kind)
        and issubclass(kind, keras_internals.Metric)
        and kind is not keras_internals.Metric
        for kind in type(metric).__mro__
    )


@contextmanager
def given_whole_batch(model: Any, shard: BatchShard, backend: Backend) -> Iterator[None]:
    """Have metrics that do not add up see all ranks' rows inside of the block."""
    with ExitStack() as stack:
        for metric in flat(model):
            if not adds_up(metric):
                update = _gathering(metric.update_state, shard, backend)
            elif type(metric).update_state in (Mean.update_state, Sum.update_state):
                update = _weighing(metric.update_state, shard)
            else:
                continue
            stack.enter_context(keras_internals.replaced(metric, "update_state", update))
        yield


def _gathering(update: _Update, shard: BatchShard, backend: Backend) -> _Update:
    rows = max(shard.rows, 1) if shard.is_static else None

    def gather(value: Any) -> Any:
        shape = getattr(value, "shape", None)
        if shape is not None and len(shape) == 0 and "float" in str(value.dtype):
            ours = shard.times(ops.stop_gradient(value), shard.weight)
            (mean,) = backend.total([ours])
            return mean
        if shape is None or len(shape) == 0 or (rows is not None and shape[0] != rows):
            return value  # no rows of the batch
        return backend.gather_rows(value, shard)

    def update_state(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = keras_internals.map_leaves(gather, (args, kwargs))
        return update(*args, **kwargs)

    return update_state


def _weighing(update: _Update, shard: BatchShard) -> _Update:
    def update_state(values: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None and len(getattr(values, "shape", ())) == 0:
            sample_weight = shard.weight
        return update(values, sample_weight)

    return update_state
