"""Keras on TensorFlow: collectives are operations in the step's graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from sdp_plugins.core import CollectiveMismatchError
from sdp_plugins.tensorflow.collectives import TensorFlowCollectives

from .. import keras_internals
from ..batch_shard import DATA, DIGEST, OTHER_BATCHES, WHOLE, BatchShard, factor_of
from ..steps import StatefulStep
from ..synchronized_batch_norm import weighted_gradient
from .base import Backend
from .tensorflow_data import array_dataset, cut, cut_dataset, rows_to_read
from .tensorflow_sparse import gather_slices

if TYPE_CHECKING:
    from sdp_plugins.core import Group

log = logging.getLogger("sdp_plugins.keras")


class TensorFlowBackend(Backend):
    """The backend for TensorFlow."""

    def __init__(self, group: Group) -> None:
        self._collectives = TensorFlowCollectives(group)
        self._rank = group.rank
        self._world_size = group.world_size
        self._error_of_step: CollectiveMismatchError | None = None

    step = staticmethod(StatefulStep)
    rows_to_read = staticmethod(rows_to_read)
    cut = staticmethod(cut)
    array_dataset = staticmethod(array_dataset)
    cut_dataset = staticmethod(cut_dataset)

    def prepare(self, model: Any) -> None:
        """Reset ``jit_compile=True``: XLA cannot compile the collectives."""
        if model.jit_compile:
            log.warning(
                "model '%s': jit_compile=True is undone: XLA cannot compile the collectives of its "
                "steps. TensorFlow's own graph compiler runs them.",
                model.name,
            )
            model.jit_compile = False

    def average_gradients(self, grads: Sequence[Any], shard: BatchShard | None) -> list[Any]:
        """Average gradients, last layers first; sparse gradients stay sparse."""
        batch = None if shard is None else shard.batch
        gather = partial(gather_slices, self._collectives, batch=batch)
        averaged = self._collectives.all_reduce_gradients(grads, "avg", factor_of(shard), gather)
        if self.is_atomic:  # no update begins before all gradients are there
            with tf.control_dependencies(tf.nest.flatten(averaged, expand_composites=True)):
                averaged = tf.nest.map_structure(tf.identity, averaged, expand_composites=True)
        return averaged

    def check_same_gradients(self, grads: Sequence[Any], variables: Sequence[Any] | None) -> None:
        """Check that the same gradients are None on all ranks."""
        names = [variable.path for variable in variables or ()]
        self._collectives.check_same_gradients(
            [
                f"'{name}' has {'no' if grad is None else 'a'} gradient"
                for name, grad in zip(names or range(len(grads)), grads, strict=True)
            ]
        )

    def all_reduce(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the sum over ranks of each tensor."""
        return self._collectives.all_reduce(tensors, "sum")

    def control_dependencies(self, batch: Any) -> AbstractContextManager[None]:
        """Run operations only if a batch exists: TensorFlow finds the end of data during a step."""
        made: AbstractContextManager[None] = tf.control_dependencies(
            [leaf for leaf in tf.nest.flatten(batch, True) if tf.is_tensor(leaf)]
        )
        return made

    def all_reduce_with_gradient(self, tensors: Sequence[Any], shard: BatchShard) -> Sequence[Any]:
        """Return sums over ranks, with sums as gradients."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def total(*tensors: Any) -> Any:
            def gradient(*upstream: Any) -> list[Any]:
                return weighted_gradient(upstream, shard, self.all_reduce)

            return self.all_reduce(tensors), gradient

        sums: Sequence[Any] = total(*tensors)
        return sums

    def gather_rows(self, tensor: Any, shard: BatchShard) -> Any:
        """Gather all ranks' rows with an uneven all_gather; Keras' crossentropies read LOGITS."""
        logits = getattr(tensor, keras_internals.LOGITS, None)
        parts = [part[: shard.rows] for part in (tensor, logits) if part is not None]
        whole, *of_logits = self._collectives.all_gather(parts)
        if of_logits:
            setattr(whole, keras_internals.LOGITS, of_logits[0])
        return whole

    def compare(self, data: Any) -> Any:
        """Check in every step that all ranks have read the same batch."""
        if DIGEST not in data:
            return data
        mine = tf.one_hot(self._rank, self._world_size, data[DIGEST], tf.zeros_like(data[DIGEST]))
        (digests,) = self._collectives.all_reduce([mine], "sum")
        others = tf.where(tf.not_equal(digests, digests[0]))[:, 0]
        compared = tf.cond(
            tf.size(others) > 0,
            lambda: tf.numpy_function(self._refuse, [others], tf.int64),
            lambda: others,
        )
        with tf.control_dependencies([compared]):
            return {**data, WHOLE: tf.identity(data[WHOLE])}

    def _refuse(self, others: np.ndarray[Any, Any]) -> None:
        text = OTHER_BATCHES.format(f"rank {others[0]}")
        self._error_of_step = CollectiveMismatchError(
            f"{self._collectives.group.error_prefix}{text}", ranks=tuple(others.tolist())
        )
        raise self._error_of_step

    def error_of_step(self, op: str) -> Exception | None:
        """Return the error of ``compare``, once."""
        error, self._error_of_step = self._error_of_step, None
        if error is not None:
            error.op = op
        return error

    def length(self, tensor: Any) -> Any:
        """Return the number of rows: an integer if the shape is known."""
        return tensor.shape[0] if tensor.shape[0] is not None else tf.shape(tensor)[0]

    def read(self, variable: Any) -> Any:
        """Return the current value."""
        return tf.identity(variable.value)

    def elements(self, variable: Any, part: slice) -> np.ndarray[Any, Any]:
        """Return elements; Keras' conversion would copy the variable."""
        return np.ravel(np.asarray(variable.value.read_value()))[part]

    def global_batches(self, source: Any, seed: int) -> Any:
        """Return tensors; ``cut_dataset`` cuts batches in the dataset's graph instead."""
        return source.get_tf_dataset()

    def array_batches(self, adapter: Any) -> Any:
        """Return NumPy's arrays: a dataset would read batches before they are asked for."""
        return adapter.get_numpy_iterator()

    def endless_dataset(self) -> Any:
        """Return a dataset of nothing."""
        return tf.data.Dataset.from_tensors(0).repeat()

    def compiled(self, model: Any, step: str) -> Callable[..., Any]:
        """Return a function with the step's graph."""
        function: Callable[..., Any] = getattr(model, step)
        return (
            function
            if model.run_eagerly
            else tf.function(function, autograph=False, reduce_retracing=True)
        )

    def after_updates(self, model: Any) -> AbstractContextManager[None]:
        """Run operations after those that have changed the weights in this graph."""
        variables = model.trainable_variables if self.is_atomic else ()
        if self.is_atomic and model.optimizer is not None:
            variables = [*variables, *model.optimizer.variables]
        made: AbstractContextManager[None] = tf.control_dependencies(
            [variable.value.read_value() for variable in variables]
        )
        return made

    def batches(self, adapter: Any) -> Any:
        """Return a ``tf.data.Dataset``."""
        return adapter.get_tf_dataset()

    def data_of(self, adapter: Any) -> Any:
        """Return a dataset of this rank's rows."""
        return self.batches(adapter).map(lambda batch: batch[DATA])

    def example(self, adapter: Any) -> Any:
        """Return the shapes of a batch: reading one could shuffle again."""
        return self.batches(adapter).element_spec
