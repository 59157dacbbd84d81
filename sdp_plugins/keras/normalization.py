"""BatchNormalization(synchronized=True): moments over all ranks' rows of a batch.

Keras asks TensorFlow's distribution strategy for sums over ranks there, and none is active. A rank
without rows adds nothing. The gradient of a sum over ranks is a sum over ranks, too: of what each
rank's loss makes of it, as much as that loss counts in the mean over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from keras import ops

from . import hooks

if TYPE_CHECKING:
    from .share import Share


@contextmanager
def over_whole_batch(
    share: Share, total: Callable[[Sequence[Any]], Sequence[Any]]
) -> Iterator[None]:
    """Have Keras compute synchronized moments so inside of the block.

    Args:
        share: This rank's part of the batch.
        total: Sums tensors over ranks, and has a gradient.
    """
    of_this_rank = hooks.backend_nn.moments

    def moments(x: Any, axes: Any, keepdims: bool = False, synchronized: bool = False) -> Any:
        if not synchronized:
            return of_this_rank(x, axes, keepdims)
        dtype = x.dtype
        x = ops.cast(x, hooks.result_type(dtype, "float32"))  # squares of 16 bits overflow
        ours = [ops.sum(values, axes, keepdims=keepdims) for values in (x, x * x, ops.ones_like(x))]
        first, second, count = total([share.times(values, 1) for values in ours])
        mean = ops.divide_no_nan(first, count)
        variance = ops.maximum(ops.divide_no_nan(second, count) - mean * mean, 0.0)
        return ops.cast(mean, dtype), ops.cast(variance, dtype)

    with hooks.replaced(hooks.backend_nn, "moments", moments):
        yield


def weighted_gradient(
    upstream: Sequence[Any], share: Share, total: Callable[[Sequence[Any]], Sequence[Any]]
) -> list[Any]:
    """The gradient of a sum over ranks, of a loss that is their mean weighted by their shares.

    What a rank makes of it is multiplied by its weight afterwards, with all of its gradients; so it
    is divided by that here.
    """
    everyones = total([share.times(gradient, share.weight) for gradient in upstream])
    weight = ops.cast(share.weight, "float32")
    return [ops.divide_no_nan(each, ops.cast(weight, each.dtype)) for each in everyones]
