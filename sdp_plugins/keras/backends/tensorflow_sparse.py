"""Sparse gradients on TensorFlow: separates slices of batch rows from slices shared by all ranks.

An embedding of the rows' ids has slices for each row, so the slices of the whole batch are the
concatenation of all ranks' slices. An embedding of ids that do not depend on the rows, such as
positions, has one slice for each id, whose value is a sum over all ranks' rows. The difference
matters because Keras' optimizers clip and square slices before summing those with the same id.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sdp_plugins.tensorflow.collectives import TensorFlowCollectives

_SHAPES_ONLY = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"}


def gather_slices(collectives: TensorFlowCollectives, slices: Any, batch: Any) -> Any:
    """Return all ranks' slices, of which this rank's are already weighted.

    If this rank's rows are unknown (None), all slices count as slices of rows.
    """
    if batch is None:
        return collectives.all_gather_slices(slices)
    if tf.executing_eagerly():  # the origin of the ids is unknown
        return collectives.all_gather_slices(slices, may_be_shared=True)
    parts = _parts(slices.indices)
    values = tf.split(slices.values, [tf.shape(part)[0] for part in parts])
    rows = {tensor.ref() for tensor in tf.nest.flatten(batch, True) if tf.is_tensor(tensor)}
    whole = [
        collectives.all_gather_slices(
            tf.IndexedSlices(value, part, slices.dense_shape),
            may_be_shared=not _depends_on(part, rows),
        )
        for value, part in zip(values, parts, strict=True)
    ]
    if len(whole) == 1:
        return whole[0]
    return tf.IndexedSlices(
        tf.concat([part.values for part in whole], 0),
        tf.concat([part.indices for part in whole], 0),
        slices.dense_shape,
    )


def _parts(indices: Any) -> list[Any]:
    """Split the indices, which TensorFlow has concatenated, by use of the variable."""
    if indices.op.type != "ConcatV2":
        return [indices]
    return [part for tensor in indices.op.inputs[:-1] for part in _parts(tensor)]


def _depends_on(tensor: Any, sources: set[Any]) -> bool:
    """Return whether a tensor depends on the values, and not only the shapes, of others."""
    seen, todo = set(), [tensor]
    while todo:
        each = todo.pop()
        if each.ref() in sources:
            return True
        if each.ref() in seen or each.op.type in _SHAPES_ONLY:
            continue
        seen.add(each.ref())
        todo += each.op.inputs
        if each.op.type == "Placeholder" and hasattr(each.graph, "captures"):
            todo += [outer for outer, inner in each.graph.captures if inner is each]
    return False
