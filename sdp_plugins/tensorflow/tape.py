"""A gradient tape that averages gradients over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .compression import Compression
from .functions import ReduceOp, reduce_all


class DistributedGradientTape:
    """Wraps a ``tf.GradientTape``; everything except ``gradient`` is the tape's own.

    ::

        with tf.GradientTape() as tape:
            loss = ...
        tape = DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
    """

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = True,
        op: ReduceOp = ReduceOp.AVERAGE,
    ) -> None:
        """Wrap a tape.

        Args:
            gradtape: The tape.
            device_dense: Not supported.
            device_sparse: Not supported.
            compression: The compression of gradients in transit.
            sparse_as_dense: Whether to convert sparse gradients to dense ones.
            op: The reduction; only the average is supported.

        Raises:
            ValueError: An argument is not supported.
        """
        refuse_devices(device_dense, device_sparse)
        if op is not ReduceOp.AVERAGE:
            raise ValueError("DistributedGradientTape: op must be ReduceOp.AVERAGE")
        self._tape = gradtape
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._tape.__exit__(*error)

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the tape's gradients, averaged over the ranks, in the structure of the sources."""
        gradients = self._tape.gradient(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(gradients, expand_composites=False)
        averaged = reduce_all(flat, self._compression, sparse_as_dense=self._sparse_as_dense)
        return tf.nest.pack_sequence_as(gradients, averaged, expand_composites=False)


def refuse_devices(device_dense: str | None, device_sparse: str | None) -> None:
    """Raise for arguments that exist only for compatibility.

    Raises:
        ValueError: The caller passed one of them.
    """
    for name, value in (("device_dense", device_dense), ("device_sparse", device_sparse)):
        if value:
            raise ValueError(f"{name} is not supported. Hint: leave it out; the CPU reduces.")
