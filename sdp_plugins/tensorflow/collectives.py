"""Collectives in TensorFlow's graphs and in eager mode.

Each fusion buffer is one operation (see ``operations``). Where it cannot be compiled, NumPy
functions copy the tensors. The collectives of one process run in the order in which they were
traced, also in branches of conditionals: each collective reads and then assigns the same variable,
and TensorFlow preserves the order of these accesses. XLA (``jit_compile=True``) cannot compile
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from sdp_plugins.core import DType, Group, ReduceOp, native_api
from sdp_plugins.core.shared_malloc import share_large_blocks
from sdp_plugins.core.tensor_lists import (
    FusedAllReduce,
    broadcast_arrays,
    check_same_gradients,
    gather_uneven,
)

from . import operations

_LAST = "_sdp_last_collective"
_NUMPY_ONLY = (tf.bool, tf.complex64, tf.complex128)
"""The core reduces these types, but the compiled operation does not."""


class TensorFlowCollectives:
    """A group's collectives on tensors.

    Attributes:
        group: The group.
    """

    def __init__(self, group: Group) -> None:
        """Use the compiled operation if all ranks have it."""
        self.group = group
        self._reduce = FusedAllReduce(group, share_large_blocks(group, tf))
        self._turn = tf.Variable(0, trainable=False, dtype=tf.int64, name="smddp_turn")
        self._endpoint = native_api.agreed_endpoint(group, operations.all_reduce)

    def all_reduce(self, tensors: Sequence[Any], op: str, factor: Any = 1.0) -> list[Any]:
        """Reduce lists of tensors.

        Args:
            tensors: Tensors of equal shapes and dtypes on all ranks. Their memory is reused if
                nothing else needs it. In graphs the first ones are sent as soon as they are
                computed.
            op: ``sum``, ``avg``, ``min`` or ``max``.
            factor: The factor by which this rank's tensors are multiplied before the reduction.
        """
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        factor = _cast(factor, tf.float64)

        def reduce(bucket: Sequence[Any]) -> Sequence[Any]:
            by_numpy = self._endpoint is None or bucket[0].dtype in _NUMPY_ONLY
            return (self._by_numpy if by_numpy else self._by_operation)(bucket, op, factor)

        reduced = self._reduce.by_bucket(
            tensors,
            [(t.shape.num_elements(), DType.parse(t.dtype.name)) for t in tensors],
            op,
            lambda bucket: self._in_turn(partial(reduce, bucket)),
        )
        for result, tensor in zip(reduced, tensors, strict=True):
            result.set_shape(tensor.shape)
        return reduced

    def _by_operation(self, tensors: Sequence[Any], op: str, factor: Any) -> Sequence[Any]:
        reduced: Sequence[Any] = operations.all_reduce()(
            factor=factor,
            timeout_s=tf.constant(self.group.timeout_s, tf.float64),
            tensors=tensors,
            endpoint=self._endpoint,
            dtype=int(DType.parse(tensors[0].dtype.name).native),
            reduce_op=int(ReduceOp.parse(op).native),
        )
        return reduced

    def _by_numpy(self, tensors: Sequence[Any], op: str, factor: Any) -> Sequence[Any]:
        def reduce(factor: Any, *arrays: Any) -> list[np.ndarray[Any, Any]]:
            if factor == 0:
                arrays = tuple(np.zeros_like(array) for array in arrays)
            elif factor != 1 and not tensors[0].dtype.is_integer:  # as the operation does
                arrays = tuple(array * array.dtype.type(factor) for array in arrays)
            return self._reduce.copies(arrays, op)

        return _by_host(reduce, [factor, *tensors], tensors)

    def all_reduce_gradients(
        self,
        gradients: Sequence[Any],
        op: str,
        factor: Any = 1.0,
        gather: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        """Reduce gradients, those of the last layers first: they are computed first.

        Args:
            gradients: Tensors, or ``tf.IndexedSlices``, which stay sparse.
            op: ``sum`` or ``avg``; without slices also ``min`` or ``max``.
            factor: As for ``all_reduce``.
            gather: Gathers all ranks' slices; None: ``all_gather_slices``.
        """
        found: dict[int, Any] = {}
        dense: list[int] = []
        for index in reversed(range(len(gradients))):
            if isinstance(gradients[index], tf.IndexedSlices):
                slices = self._weighted(gradients[index], op, factor)
                found[index] = (gather or self.all_gather_slices)(slices)
            else:
                dense.append(index)
        if dense:
            reduced = self.all_reduce([gradients[index] for index in dense], op, factor)
            found.update(zip(dense, reduced, strict=True))
        return [found[index] for index in range(len(gradients))]

    def check_same_gradients(self, described: Sequence[str]) -> None:
        """Check that all ranks have gradients of the same variables."""

        def check() -> list[np.ndarray[Any, Any]]:
            check_same_gradients(self.group, described)
            return [np.zeros(0, np.int8)]

        self._in_turn(partial(_by_host, check, [], [tf.zeros(0, tf.int8)]))

    def _weighted(self, slices: Any, op: str, factor: Any) -> Any:
        """Return the slices whose sum over the ranks is the reduction; zeros if they count 0."""
        weight = _cast(factor, slices.values.dtype)
        if op == "avg":
            weight /= self.group.world_size
        values = slices.values * weight
        values = tf.where(tf.not_equal(weight, 0), values, tf.zeros_like(values))
        return tf.IndexedSlices(values, slices.indices, slices.dense_shape)

    def all_gather(self, tensors: Sequence[Any]) -> list[Any]:
        """Concatenate the ranks' tensors along the first axis, whose length may differ."""

        def gather(*arrays: Any) -> list[np.ndarray[Any, Any]]:
            return [gather_uneven(self.group, array) for array in arrays]

        gathered = self._in_turn(partial(_by_host, gather, tensors))
        for result, tensor in zip(gathered, tensors, strict=True):
            result.set_shape([None, *tensor.shape[1:]])
        return list(gathered)

    def all_gather_slices(self, slices: Any, may_be_shared: bool = False) -> Any:
        """Concatenate all ranks' slices, or sum them.

        Args:
            slices: This rank's slices.
            may_be_shared: Whether to sum the values if all ranks have the same indices. One process
                has these slices once, and optimizers that square or clip slices depend on it.
        """

        def gather(values: Any, indices: Any) -> list[np.ndarray[Any, Any]]:
            everyones = gather_uneven(self.group, indices)
            if may_be_shared:
                same = np.array_equal(everyones, np.tile(indices, self.group.world_size))
                if native_api.all_agree(self.group, same):
                    return [*self._reduce.copies([values], "sum"), np.array(indices)]
            return [gather_uneven(self.group, values), everyones]

        tensors = [slices.values, slices.indices]
        values, indices = self._in_turn(partial(_by_host, gather, tensors))
        values.set_shape([None, *slices.values.shape[1:]])
        indices.set_shape([None])
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def broadcast(self, tensors: Sequence[Any], root: int) -> list[Any]:
        """Copy one rank's tensors to all ranks."""

        def send(*arrays: Any) -> list[np.ndarray[Any, Any]]:
            copies = [np.array(array) for array in arrays]
            broadcast_arrays(self.group, copies, root)
            return copies

        sent = self._in_turn(partial(_by_host, send, tensors))
        for result, tensor in zip(sent, tensors, strict=True):
            result.set_shape(tensor.shape)
        return list(sent)

    def _in_turn(self, call: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Run a collective after those that were traced before it."""
        if tf.executing_eagerly():
            return call()
        graph = tf.compat.v1.get_default_graph()
        if not graph.building_function:  # TensorFlow 1 orders by explicit dependencies
            with tf.control_dependencies(getattr(graph, _LAST, [])):
                results = call()
            setattr(graph, _LAST, [results[0].op])
            return results
        with tf.control_dependencies([self._turn.read_value()]):
            results = call()
        with tf.control_dependencies(results):
            self._turn.assign_add(1)
        return results


def _by_host(
    function: Callable[..., Any], inputs: Sequence[Any], like: Sequence[Any] | None = None
) -> Sequence[Any]:
    """Run a function on NumPy arrays; its results have the types of its inputs, or of `like`."""
    types = [tensor.dtype for tensor in like or inputs]
    results = tf.numpy_function(function, inputs, types)
    return results if isinstance(results, (list, tuple)) else [results]


def _cast(number: Any, dtype: Any) -> Any:
    """Convert a number; ``tf.cast`` alone would first make a Python float a float32."""
    return tf.cast(tf.convert_to_tensor(number, dtype_hint=tf.float64), dtype)
