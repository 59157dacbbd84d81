"""Collectives in TensorFlow's graphs, and eagerly.

One operation for each fusion buffer (see ``operations``); where it cannot be had, NumPy functions,
which copy. Those of one process run one after the other, in the order in which they were traced,
also in branches of conditionals: TensorFlow orders what reads and writes a variable, the turn, and
each takes its turn by one. XLA orders nothing but what needs the other's result, so each operation
is given the turn and makes the next one of it.

What goes by NumPy XLA cannot compile. There the shapes of tensors are known, so rows and
broadcasts are sums of tensors that are zero where another rank's part is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from sdp_plugins.core import DType, Group, ReduceOp, native_api
from sdp_plugins.core._native import Op
from sdp_plugins.core.buckets import buckets
from sdp_plugins.core.config import Config
from sdp_plugins.core.fused import FusedAllReduce, gather_uneven
from sdp_plugins.core.native_build import CompileError

from . import operations
from .operations import in_xla

_LAST = "_sdp_last_collective"
_NOT_COMPILED = (
    "{} cannot be compiled by XLA: {}. Hint: leave jit_compile=True out, or put the call outside "
    "of the function that has it."
)


class Collectives:
    """A group's collectives on tensors."""

    def __init__(self, group: Group) -> None:
        """Use the compiled operation if all ranks have it."""
        self._group = group
        self._reduce = FusedAllReduce(group)
        self._threshold = Config.from_env().fusion_bytes
        self._turn = tf.Variable(0, trainable=False, dtype=tf.int64, name="smddp_turn")
        self._endpoint = native_api.agreed_endpoint(group, operations.available())
        self._compiles: bool | None = None

    def compiles(self) -> bool:
        """Whether XLA can compile ``all_reduce``, on all ranks, which must all ask."""
        if self._compiles is None:
            here = self._endpoint is not None and operations.xla_available()
            self._compiles = native_api.everywhere(self._group, here)
        return self._compiles

    def all_reduce(self, tensors: Sequence[Any], op: str, factor: Any = 1.0) -> list[Any]:
        """Combine lists of tensors.

        Args:
            tensors: Of equal shapes and types on all ranks. Their memory is reused where nothing
                else needs it. In graphs those at the beginning leave as soon as they are computed.
            op: ``sum``, ``avg``, ``min`` or ``max``.
            factor: What this rank's tensors are multiplied by before.
        """
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        factor = tf.cast(factor, tf.float32)
        if in_xla():
            self._prepare_xla()
        if self._endpoint is None:
            reduced = self._by_numpy(tensors, op, factor)
        else:
            reduced = self._by_operation(tensors, op, factor)
        for result, tensor in zip(reduced, tensors, strict=True):
            result.set_shape(tensor.shape)
        return reduced

    def _by_operation(self, tensors: Sequence[Any], op: str, factor: Any) -> list[Any]:
        reduced: list[Any] = [None] * len(tensors)
        sizes = [(tensor.dtype, _nbytes(tensor)) for tensor in tensors]
        for members in buckets(sizes, self._threshold):
            bucket = partial(self._bucket, [tensors[i] for i in members], op, factor)
            results = self._in_turn(bucket)
            for index, result in zip(members, results, strict=True):
                reduced[index] = result
        return reduced

    def _bucket(self, tensors: Sequence[Any], op: str, factor: Any, turn: Any) -> Any:
        return operations.all_reduce()(
            turn=turn,
            factor=factor,
            tensors=tensors,
            endpoint=self._endpoint,
            op=int(Op.all_reduce),
            dtype=int(DType.parse(tensors[0].dtype.name).native),
            reduce_op=int(ReduceOp.parse(op).native),
            timeout_s=self._group.timeout_s,
        )

    def _by_numpy(self, tensors: Sequence[Any], op: str, factor: Any) -> list[Any]:
        def reduce(factor: Any, *arrays: Any) -> list[np.ndarray[Any, Any]]:
            copies = [np.array(array) for array in arrays]
            for copy in copies:
                if factor == 0:
                    copy[...] = 0
                elif factor != 1:
                    np.multiply(copy, copy.dtype.type(factor), out=copy)
            self._reduce(copies, op)
            return copies

        types = [tensor.dtype for tensor in tensors]
        return list(self._in_turn(partial(_by_host, reduce, [factor, *tensors], types)))

    def _prepare_xla(self) -> None:
        if self._endpoint is None:
            raise RuntimeError(_NOT_COMPILED.format("all_reduce", "there is no compiled operation"))
        try:
            operations.require()
        except CompileError as error:
            raise RuntimeError(_NOT_COMPILED.format("all_reduce", error)) from error

    def place_rows(self, tensor: Any, begin: Any, count: Any) -> Any:
        """All ranks' rows, where each rank knows which of them are its own.

        Args:
            tensor: This rank's rows.
            begin: The number of the first one.
            count: Of all ranks' rows.
        """
        after = [[begin, count - begin - tf.shape(tensor)[0]]]
        bits = _bits(tensor)
        padded = tf.pad(bits, tf.concat([after, tf.zeros([bits.shape.rank - 1, 2], tf.int32)], 0))
        (whole,) = self.all_reduce([padded], "sum")
        return _from_bits(whole, tensor.dtype)

    def place_slices(self, slices: Any, room: Any) -> Any:
        """All ranks' slices, with slices of zeros where a rank has fewer than there is room for."""
        begin, count = self._group.rank * room, self._group.world_size * room
        values = self.place_rows(slices.values, begin, count)
        indices = self.place_rows(slices.indices, begin, count)
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def require(self, condition: Any, text: str) -> None:
        """Have what XLA compiles fail if a condition, the same on all ranks, is false."""
        self._prepare_xla()
        self._in_turn(lambda turn: (operations.require()(turn, condition, text=text), []))

    def all_gather(self, tensors: Sequence[Any]) -> list[Any]:
        """Concatenate the ranks' tensors along the first axis, in which they may differ.

        Raises:
            RuntimeError: XLA is to compile it.
        """
        if in_xla():
            raise RuntimeError(
                _NOT_COMPILED.format("all_gather", "how many rows others have is not known")
            )

        def gather(*arrays: Any) -> list[np.ndarray[Any, Any]]:
            return [gather_uneven(self._group, array) for array in arrays]

        types = [tensor.dtype for tensor in tensors]
        gathered = self._in_turn(partial(_by_host, gather, tensors, types))
        for result, tensor in zip(gathered, tensors, strict=True):
            result.set_shape([None, *tensor.shape[1:]])
        return list(gathered)

    def all_gather_slices(self, slices: Any) -> Any:
        """All ranks' slices, one after the other."""
        values, indices = self.all_gather([slices.values, slices.indices])
        return tf.IndexedSlices(values, indices, slices.dense_shape)

    def broadcast(self, tensors: Sequence[Any], root: int) -> list[Any]:
        """One rank's tensors, on all ranks."""
        if in_xla():
            bits = [_bits(tensor) for tensor in tensors]
            if self._group.rank != root:
                bits = [tf.zeros_like(each) for each in bits]
            sums = self.all_reduce(bits, "sum")
            pairs = zip(sums, tensors, strict=True)
            return [_from_bits(each, tensor.dtype) for each, tensor in pairs]

        def send(*arrays: Any) -> list[np.ndarray[Any, Any]]:
            copies = [np.array(array) for array in arrays]
            for copy in copies:
                if copy.size:
                    self._group.broadcast(copy.reshape(-1).view(np.uint8), root)
            return copies

        types = [tensor.dtype for tensor in tensors]
        sent = self._in_turn(partial(_by_host, send, tensors, types))
        for result, tensor in zip(sent, tensors, strict=True):
            result.set_shape(tensor.shape)
        return list(sent)

    def _in_turn(self, call: Callable[[Any], tuple[Any, Sequence[Any]]]) -> Sequence[Any]:
        """Have a collective run after those that were traced before it.

        Args:
            call: Takes the turn; returns the next one, and results.
        """
        if tf.executing_eagerly():
            return call(0)[1]
        graph = tf.compat.v1.get_default_graph()
        if not graph.building_function:  # of TensorFlow 1: there the order is what it is told
            with tf.control_dependencies(getattr(graph, _LAST, [])):
                _, results = call(0)
            setattr(graph, _LAST, [results[0].op])
            return results
        turn = self._turn.read_value()
        with tf.control_dependencies([turn]):
            turn, results = call(turn)
        with tf.control_dependencies(results):
            self._turn.assign(turn)
        return results


def _by_host(
    function: Callable[..., Any], inputs: Sequence[Any], types: Sequence[Any], turn: Any
) -> tuple[Any, Sequence[Any]]:
    """Run a function on NumPy arrays."""
    results = tf.numpy_function(function, inputs, types)
    return turn, results if isinstance(results, (list, tuple)) else [results]


def _nbytes(tensor: Any) -> int | None:
    count = tensor.shape.num_elements()
    return None if count is None else count * tensor.dtype.size


def _bits(tensor: Any) -> Any:
    """Whole numbers that a tensor can be made of again, after zeros were added to them."""
    if tensor.dtype == tf.bool:
        return tf.cast(tensor, tf.uint8)
    if tensor.dtype in _WHOLE:
        return tensor
    return tf.bitcast(tensor, _WHOLE_OF_SIZE[tensor.dtype.size])


def _from_bits(bits: Any, dtype: Any) -> Any:
    if dtype == tf.bool:
        return tf.cast(bits, dtype)
    return bits if bits.dtype == dtype else tf.bitcast(bits, dtype)


_WHOLE = (tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8)
_WHOLE_OF_SIZE = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}
