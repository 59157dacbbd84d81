"""Cut batches on TensorFlow: each is an element of a ``tf.data.Dataset``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from sdp_plugins.tensorflow.datasets import rows_of

from .. import keras_internals
from ..batch_shard import DIGEST, mark, rows


def rows_to_read(count: Any, rank: int, world_size: int) -> tuple[Any, Any]:
    """Compute ``batch_shard.rows_to_read`` for a tensor."""
    begin, length = rows(count, rank, world_size)
    return tf.minimum(begin, count - 1), tf.maximum(length, 1)


def cut(data: Any, begin: Any, length: Any) -> Any:
    """Return rows of every tensor of a structure, in memory of their own."""
    return keras_internals.map_leaves(lambda leaf: rows_of(leaf, begin, begin + length), data)


def cut_dataset(dataset: Any, rank: int, world_size: int) -> Any:
    """Cut every batch of a dataset to a rank's rows."""
    is_tuple = type(dataset.element_spec) is tuple  # map() passes its parts one by one

    def cut_batch(*data: Any) -> dict[str, Any]:
        batch = data if is_tuple else data[0]
        count = tf.shape(keras.tree.flatten(batch)[0])[0]
        marked = mark(cut(batch, *rows_to_read(count, rank, world_size)), _whole(count))
        digest = _digest(keras.tree.flatten(batch)[0])
        return marked if digest is None else {**marked, DIGEST: digest}

    return dataset.map(cut_batch, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def array_dataset(arrays: Any, indices: Callable[[], Iterator[tuple[Any, int]]]) -> Any:
    """Return batches of arrays, by an epoch's indices."""
    inputs = keras_internals.array_slicing.convert_to_sliceable(arrays, target_backend="tensorflow")
    inputs = keras.tree.lists_to_tuples(inputs)

    def numbers() -> Iterator[tuple[Any, int]]:
        for chosen, count in indices():
            if isinstance(chosen, slice):
                chosen = np.arange(chosen.start, chosen.stop)
            yield chosen.astype(np.int64), count

    def take(chosen: Any, count: Any, data: Any) -> dict[str, Any]:
        def rows_of(leaf: Any) -> Any:
            if isinstance(leaf, keras_internals.array_slicing.TensorflowSparseWrapper):
                return keras_internals.array_slicing.slice_tensorflow_sparse_wrapper(leaf, chosen)
            if isinstance(leaf, (list, tuple, dict)):
                return None
            return tf.gather(leaf, chosen, axis=0) if tf.is_tensor(leaf) else leaf

        return mark(keras.tree.traverse(rows_of, data), _whole(count))

    signature = (tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int32))
    steps = tf.data.Dataset.from_generator(numbers, output_signature=signature)
    return (
        tf.data.Dataset.zip((steps, tf.data.Dataset.from_tensors(inputs).repeat()))
        .map(lambda step, data: take(step[0], step[1], data), num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
    )


def _digest(leaf: Any) -> Any:
    """Return a hash of a batch's first and last row, below 2^31."""
    if not isinstance(leaf, tf.Tensor):
        return None
    ends = tf.io.serialize_tensor(tf.concat([leaf[:1], leaf[-1:]], axis=0))
    return tf.strings.to_hash_bucket_fast(ends, 2**31)


def _whole(count: Any) -> Any:
    return tf.zeros([count, 0], tf.bool)
