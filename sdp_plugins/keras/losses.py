"""Losses of the whole batch.

The ranks' gradients are averaged with the ranks' numbers of rows as weights. That is correct for
means over rows, which stay unchanged. A sum, and a mean with a mask or weights, has to be divided
by the divisor of the whole batch instead of this rank's. A loss that relates rows to each other is
computed from all ranks' rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops

from . import keras_internals
from .keras_internals import wrap_once
from .running_step import RunningStep, running, running_step

_Function = Callable[..., Any]
_ONE_NUMBER_BY_DEFAULT = ("dice", "tversky")


def install() -> None:
    """Make Keras' losses use the running step; without one they are unchanged."""
    wrap_once(keras_internals.loss_module, "reduce_weighted_values", _of_whole_batch)
    wrap_once(keras.losses.Loss, "__call__", _of_all_rows)


def relates_rows(function: _Function, options: Mapping[str, Any], ndim: int | None = None) -> bool:
    """Return whether a Keras function computes anything but a mean over the rows of a batch.

    The function is a loss or a metric, with these keyword arguments; `ndim` is the number of
    dimensions of the predictions, if known.
    """
    if ndim == 1:  # functions sum over the last axis, which is that of the rows
        return True
    name = getattr(function, "__name__", "")
    if name == "circle":  # computed from pairs of rows
        return function is keras.losses.circle
    axis = options.get("axis", None if name in _ONE_NUMBER_BY_DEFAULT else -1)
    axes = axis if isinstance(axis, (list, tuple)) else (axis,)
    return any(
        each is None or each == 0 or (each < -1 and each + (ndim or 0) <= 0) for each in axes
    )


def refuse_unreduced(model: Any) -> None:
    """Check that a model's compiled losses return one number for a batch.

    Raises:
        ValueError: A loss returns a number for each row: Keras trains on their sum on TensorFlow,
            and not at all on the other backends.
    """
    compiled = model._compile_loss
    for loss in keras.tree.flatten(compiled._user_loss) if compiled is not None else ():
        if isinstance(loss, keras.losses.Loss) and loss.reduction in (None, "none"):
            raise ValueError(
                f"model '{model.name}' is compiled with {type(loss).__name__}(reduction=None), "
                "which has a number for each row. Hint: use reduction='sum', which is what Keras "
                "trains on then, or 'sum_over_batch_size'."
            )


def _of_whole_batch(reduce_values: _Function) -> _Function:
    """Wrap the reduction of a loss to use the divisor of the whole batch."""

    def reduced(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        loss = reduce_values(values, sample_weight, mask, reduction, dtype)
        step = running_step()
        if step is None or reduction in (None, "none") or len(values.shape) == 0:
            return loss
        shard = step.shard
        if reduction == "sum":
            return loss * _divide(1.0, shard.weight, loss.dtype)
        if reduction == "mean_with_sample_weight" and not (sample_weight is mask is None):
            divisor = keras_internals.loss_module.apply_mask(
                sample_weight, mask, loss.dtype, reduction
            )
        elif mask is not None:
            divisor = mask
        else:
            return loss
        ours = ops.stop_gradient(ops.sum(ops.cast(divisor, loss.dtype)))
        (everyones,) = step.backend.all_reduce([shard.times(ours, 1)])
        return loss * _divide(_divide(ours, everyones, loss.dtype), shard.weight, loss.dtype)

    return reduced


def _of_all_rows(call: _Function) -> _Function:
    """Wrap the call of a loss: compute a loss that relates rows from all ranks' rows.

    Every rank computes the whole loss, and the gradient for its own rows. That gradient is divided
    by the rank's weight in the mean over ranks.
    """

    def computed(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        step = running_step()
        if step is None or not _loss_relates_rows(loss, y_pred):
            return call(loss, y_true, y_pred, sample_weight)
        whole_true, whole_weight = keras_internals.map_leaves(
            lambda each: _gathered(each, step), (y_true, sample_weight)
        )
        whole_pred = _with_own_gradient(y_pred, step)
        mask = keras_internals.get_keras_mask(y_pred)
        if mask is not None:
            whole_mask = ops.cast(_gathered(ops.cast(mask, "int32"), step), "bool")
            keras_internals.set_keras_mask(whole_pred, whole_mask)
        with running(None):
            value = call(loss, whole_true, whole_pred, whole_weight)
        same = ops.stop_gradient(value)
        return same + (value - same) * _divide(1.0, step.shard.weight, value.dtype)

    return computed


def _loss_relates_rows(loss: Any, y_pred: Any) -> bool:
    function = getattr(loss, "fn", None)  # of a LossFunctionWrapper
    if (
        function is None
        or not keras_internals.is_of_keras(function)
        or keras.tree.is_nested(y_pred)
    ):
        return False
    return relates_rows(function, loss._fn_kwargs, len(y_pred.shape))


def _gathered(value: Any, step: RunningStep) -> Any:
    if len(getattr(value, "shape", ())) == 0:
        return value  # one weight for all rows
    return step.backend.gather_rows(ops.convert_to_tensor(value), step.shard)


def _with_own_gradient(value: Any, step: RunningStep) -> Any:
    """Return all ranks' rows, with a gradient for this rank's rows, and LOGITS likewise."""
    shard = step.shard

    def joined(own: Any, whole: Any) -> Any:
        parts = [whole[: shard.begin], own[: shard.rows], whole[shard.begin + shard.rows :]]
        return ops.concatenate(parts, axis=0)

    gathered = _gathered(value, step)
    whole = joined(value, gathered)
    if (logits := getattr(gathered, keras_internals.LOGITS, None)) is not None:
        of_own = getattr(value, keras_internals.LOGITS)
        setattr(whole, keras_internals.LOGITS, joined(of_own, logits))
    return whole


def _divide(a: Any, b: Any, dtype: Any) -> Any:
    return ops.divide_no_nan(ops.cast(a, dtype), ops.cast(b, dtype))
