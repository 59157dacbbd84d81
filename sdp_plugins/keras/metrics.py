"""Metrics of the whole batch.

The state of Keras' own metrics is a sum over rows, so a batch's state is the sum over ranks. Means
and sums that get one number for a batch, such as its loss, weight it by this rank's shard. The
update of a program's own metric is unknown: such a metric gets all ranks' rows, and the ranks' mean
of one number for a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops
from keras.losses import Loss
from keras.metrics import Mean, Sum

from . import keras_internals
from .losses import relates_rows
from .running_step import RunningStep, running, running_step

_Arguments = Callable[[RunningStep, Any, Any], Any]
_PATCHED = "_smddp_patched"


def flat(model: Any) -> list[Any]:
    """Return all metrics of a model, each once."""
    found: dict[int, Any] = {}
    for metric in model.metrics:
        parts = metric.metrics if isinstance(metric, keras_internals.CompileMetrics) else [metric]
        found.update((id(part), part) for part in parts)
    return list(found.values())


def adds_up(metric: Any) -> bool:
    """Return whether the state after a batch is the sum of the states after its parts."""
    function = getattr(metric, "_fn", None)  # of a MeanMetricWrapper
    if function is not None and (
        not keras_internals.is_of_keras(function) or isinstance(function, Loss)
    ):
        return False  # a loss object gives one number for a batch
    if not keras_internals.is_of_keras(type(metric).update_state):
        return False
    if function is not None and relates_rows(function, metric._fn_kwargs):
        return False
    return any(
        keras_internals.is_of_keras(kind)
        and issubclass(kind, keras.metrics.Metric)
        and kind is not keras.metrics.Metric
        for kind in type(metric).__mro__
    )


def patch_metrics(model: Any) -> None:
    """Make a model's metrics use the running step; a second call changes nothing."""
    for metric in flat(model):
        if not getattr(metric, _PATCHED, False):
            _patch_metric(metric)


def _patch_metric(metric: Any) -> None:
    update, result = metric.update_state, metric.result
    arguments = _arguments_for(metric)

    def update_state(*args: Any, **kwargs: Any) -> Any:
        if (step := running_step()) is not None:
            step.updated.add(id(metric))
            args, kwargs = arguments(step, args, kwargs)
        with running(None):  # a loss in the metric has all the rows that it needs
            return update(*args, **kwargs)

    def noted_result() -> Any:
        value = result()
        if (step := running_step()) is not None:
            step.results[id(value)] = (value, metric)
        return value

    object.__setattr__(metric, "update_state", update_state)
    object.__setattr__(metric, "result", noted_result)
    object.__setattr__(metric, _PATCHED, True)


def _arguments_for(metric: Any) -> _Arguments:
    """Return the conversion of a metric's arguments that makes its state global."""
    if not adds_up(metric):
        return _gathered
    if type(metric).update_state in (Mean.update_state, Sum.update_state):
        return _weighted
    return lambda step, args, kwargs: (args, kwargs)


def _gathered(step: RunningStep, args: Any, kwargs: Any) -> Any:
    """Gather all ranks' rows."""
    shard, backend = step.shard, step.backend
    rows = max(shard.rows, 1) if shard.is_static else None

    def gather(value: Any) -> Any:
        shape = getattr(value, "shape", None)
        if shape is not None and len(shape) == 0 and "float" in str(value.dtype):
            ours = shard.times(ops.stop_gradient(value), shard.weight)
            (mean,) = backend.all_reduce([ours])
            return mean
        if shape is None or len(shape) == 0 or (rows is not None and shape[0] != rows):
            return value  # not rows of the batch
        return backend.gather_rows(ops.convert_to_tensor(value), shard)

    return keras_internals.map_leaves(gather, (args, kwargs))


def _weighted(step: RunningStep, args: Any, kwargs: Any) -> Any:
    """Add this rank's weight to one number for the batch."""

    def weigh(values: Any, sample_weight: Any = None) -> Any:
        if sample_weight is None and len(getattr(values, "shape", ())) == 0:
            sample_weight = step.shard.weight
        return (values, sample_weight), {}

    return weigh(*args, **kwargs)
