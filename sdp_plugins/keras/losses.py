"""Losses whose divisor is that of the whole batch.

The gradients of ranks are averaged, weighted by their rows. That is right for means over rows, and
these stay as they are. A sum, and a mean over what a mask or weights leave, must count as much of
the whole as this rank's divisor does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from keras import ops

from . import hooks

if TYPE_CHECKING:
    from .backends import Backend
    from .share import Share


@contextmanager
def of_whole_batch(share: Share, backend: Backend) -> Iterator[None]:
    """Have Keras' losses reduced so inside of the block."""
    reduce_values = hooks.loss_module.reduce_weighted_values

    def reduced(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        loss = reduce_values(values, sample_weight, mask, reduction, dtype)
        if reduction in (None, "none") or len(values.shape) == 0:
            return loss
        if reduction == "sum":
            return loss * _divide(1.0, share.weight, loss.dtype)
        if reduction == "mean_with_sample_weight" and not (sample_weight is mask is None):
            divisor = hooks.loss_module.apply_mask(sample_weight, mask, loss.dtype, reduction)
        elif mask is not None:
            divisor = mask
        else:
            return loss
        ours = ops.stop_gradient(ops.sum(ops.cast(divisor, loss.dtype)))
        (everyones,) = backend.total([_if_any(ours, share)])
        return loss * _divide(_divide(ours, everyones, loss.dtype), share.weight, loss.dtype)

    with hooks.replaced(hooks.loss_module, "reduce_weighted_values", reduced):
        yield


def _divide(a: Any, b: Any, dtype: Any) -> Any:
    return ops.divide_no_nan(ops.cast(a, dtype), ops.cast(b, dtype))


def _if_any(value: Any, share: Share) -> Any:
    return share.times(value, 1)
