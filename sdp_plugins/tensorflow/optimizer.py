"""Optimizers that average gradients over the ranks before they use them."""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import tensorflow as tf

from sdp_plugins.core.config import check_bucket_mb

from .compression import Compression
from .functions import ReduceOp, reduce_all
from .job import current
from .tape import refuse_devices

_AVERAGES = "_smddp_averages"


def DistributedOptimizer(  # noqa: N802  the API's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = True,
    op: ReduceOp = ReduceOp.AVERAGE,
    bucket_cap_mb: float = 25,
) -> Any:
    """Make an optimizer average gradients over the ranks.

    Args:
        optimizer: An optimizer of ``tf.compat.v1.train`` or Keras.
        name: Name of the new optimizer (``tf.compat.v1.train`` only).
        use_locking: Whether updates use locks (``tf.compat.v1.train`` only).
        device_dense: Not supported.
        device_sparse: Not supported.
        compression: The compression of gradients in transit.
        sparse_as_dense: Whether to convert sparse gradients to dense ones.
        op: The reduction; only the average is supported.
        bucket_cap_mb: Only validated; ``SDP_FUSION_MB`` sets the size of fusion buffers.

    Returns:
        The optimizer, if it is of Keras: its class is now a subclass of the former. Or else a new
        one around it.

    Raises:
        ValueError: An argument is not supported.
        TypeError: The argument is not an optimizer.
    """
    refuse_devices(device_dense, device_sparse)
    if op is not ReduceOp.AVERAGE:
        raise ValueError("DistributedOptimizer: op must be ReduceOp.AVERAGE")
    check_bucket_mb(bucket_cap_mb)

    def average(gradients: Any) -> list[Any]:
        return reduce_all(list(gradients), compression, sparse_as_dense=sparse_as_dense)

    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        label = name or f"smdistributed.dataparallel{type(optimizer).__name__}"
        return _first_version(optimizer, label, use_locking, average)
    if hasattr(optimizer, "apply_gradients") and hasattr(optimizer, "get_config"):
        return _of_keras(optimizer, average)
    kind = type(optimizer).__name__
    raise TypeError(f"{kind} is not an optimizer of Keras or tf.compat.v1.train")


def _first_version(optimizer: Any, name: str, use_locking: bool, average: Any) -> Any:
    class Averaging(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
        """Delegates everything but gradients to the given optimizer."""

        def __init__(self) -> None:
            super().__init__(name=name, use_locking=use_locking)

        def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
            pairs = optimizer.compute_gradients(*args, **kwargs)
            gradients, variables = zip(*pairs, strict=True)
            return list(zip(average(gradients), variables, strict=True))

        def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
            return optimizer.apply_gradients(*args, **kwargs)

        def get_slot(self, *args: Any, **kwargs: Any) -> Any:
            return optimizer.get_slot(*args, **kwargs)

        def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
            return optimizer.get_slot_names(*args, **kwargs)

        def variables(self) -> Any:
            return optimizer.variables()

    return Averaging()


def _of_keras(optimizer: Any, average: Any) -> Any:
    kind = type(optimizer)
    if getattr(kind, _AVERAGES, False):  # by an earlier call, whose arguments these replace
        kind = kind.__mro__[1]
    _share_overflows()

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Average and apply; ``apply_gradients`` and an outer LossScaleOptimizer call this, too."""
        return kind.apply(self, average(grads), trainable_variables)

    # A subclass of the same name, so that files saved with it load without this package.
    members = {"apply": apply, "__module__": kind.__module__, _AVERAGES: True}
    # The same object, which may have a state, or settings that no configuration can hold.
    optimizer.__class__ = type(kind.__name__, (kind,), members)
    return optimizer


@cache
def _share_overflows() -> None:
    """Make a LossScaleOptimizer around a distributed one skip a step on all ranks or on none.

    Keras puts it there in ``compile`` under the policy ``mixed_float16``. A rank that skipped a
    step alone would not take part in the average.
    """
    scaled = tf.keras.optimizers.LossScaleOptimizer
    check = scaled.check_finite

    @wraps(check)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = check(self, grads)
        if not getattr(self.inner_optimizer, _AVERAGES, False):
            return finite
        (everywhere,) = current.collectives.all_reduce([tf.cast(finite, tf.int32)], "min")
        return tf.cast(everywhere, tf.bool)

    scaled.check_finite = check_finite
