"""The functions of SMDDP's TensorFlow API: in graphs and eagerly, on tensors and variables."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from .compression import Compression
from .job import current


class ReduceOp(enum.Enum):
    """Reductions over the ranks."""

    AVERAGE = "avg"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


def init() -> None:
    """Connect to the other ranks of the job; call it once.

    Raises:
        RuntimeError: It was called before.
    """
    current.begin()


def shutdown() -> None:
    """Leave the job."""
    current.end()


def size() -> int:
    """Return the number of ranks."""
    return current.collectives.group.world_size


def rank() -> int:
    """Return this process's rank."""
    return current.collectives.group.rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return current.collectives.group.local_size


def local_rank() -> int:
    """Return the rank among the ranks of this node."""
    return current.collectives.group.local_rank


def allreduce(
    tensor: Any = None,
    param_index: int = 0,
    num_params: int = 1,
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    grad: Any = None,
) -> Any:
    """Reduce a gradient over all ranks.

    Args:
        tensor: The gradient; ``grad`` is another name of this argument.
        param_index: The index of the tensor among the step's tensors; only validated.
        num_params: The number of the step's tensors.
        compression: The compression of the tensor in transit.
        op: The reduction.
        grad: Another name of the first argument.

    Returns:
        A new tensor. ``DistributedGradientTape`` does the same for all gradients in fewer
        operations.

    Raises:
        ValueError: The index is out of range, or there is no tensor.
    """
    if (tensor is None) == (grad is None):
        raise ValueError("allreduce: give the gradient, as the first argument or by grad=")
    if not 0 <= param_index < num_params:
        raise ValueError(f"allreduce: there is no tensor {param_index} of {num_params}")
    return reduce_all([grad if tensor is None else tensor], compression, op)[0]


def oob_allreduce(
    tensor: Any, compression: Any = Compression.none, op: ReduceOp = ReduceOp.AVERAGE
) -> Any:
    """Reduce any tensor over all ranks, such as a loss."""
    return reduce_all([tf.convert_to_tensor(tensor)], compression, op)[0]


def reduce_all(
    tensors: Sequence[Any],
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    sparse_as_dense: bool = True,
) -> list[Any]:
    """Reduce lists of tensors, last ones first; None stays None.

    Sparse tensors are converted to dense ones; otherwise the ranks' slices are concatenated.

    Raises:
        ValueError: The reduction does not support slices.
        CollectiveMismatchError: Other tensors are None, or sparse, on other ranks.
    """
    given = {index: tensor for index, tensor in enumerate(tensors) if tensor is not None}
    kinds = [_kind(tensor, sparse_as_dense) for tensor in tensors]
    if len(set(kinds)) > 1:  # else a rank that differs makes another call
        current.collectives.check_same_gradients(
            [f"gradient {index} is {kind}" for index, kind in enumerate(kinds)]
        )
    contexts: dict[int, Any] = {}
    for index, tensor in given.items():
        if kinds[index] == "dense":
            sent = compression.compress(tf.convert_to_tensor(tensor))
            given[index], contexts[index] = sent
        elif op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"sparse gradients have no {op.name}. Hint: sparse_as_dense=True.")
    reduced = current.collectives.all_reduce_gradients([*given.values()], op.value)
    found = dict(zip(given, reduced, strict=True))
    for index, context in contexts.items():
        found[index] = compression.decompress(found[index], context)
    return [found.get(index) for index in range(len(tensors))]


def _kind(gradient: Any, sparse_as_dense: bool) -> str:
    if gradient is None:
        return "missing"
    stays = isinstance(gradient, tf.IndexedSlices) and not sparse_as_dense
    return "sparse" if stays else "dense"


def broadcast(tensor: Any, root_rank: int) -> Any:
    """Copy a tensor of one rank to all ranks."""
    return current.collectives.broadcast([tf.convert_to_tensor(tensor)], root_rank)[0]


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> Any:
    """Copy one rank's variables to all ranks.

    Args:
        variables: Variables of TensorFlow or Keras.
        root_rank: The rank.

    Returns:
        In a TensorFlow 1 graph, the operation that copies them.
    """
    variables = list(variables)
    values = [tf.convert_to_tensor(variable) for variable in variables]
    sent = current.collectives.broadcast(values, root_rank) if values else []
    return tf.group(
        *(variable.assign(value) for variable, value in zip(variables, sent, strict=True))
    )


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the operation that copies one rank's variables of this graph to all ranks."""
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def overlap(tensor: Any) -> Any:
    """Return the tensor: communication overlaps computation automatically."""
    return tensor
