"""Datasets of which every rank reads its part: each global batch is cut by rank.

A global batch of N rows is cut into contiguous parts whose sizes differ by at most one row, so all
ranks take the same number of steps. If there are more ranks than rows, some parts are empty.
"""

from __future__ import annotations

import hashlib
from typing import Any

import tensorflow as tf

from sdp_plugins.core import Group

NO_ROWS = (
    "experimental_distribute_dataset: its elements are not batches: {} has no rows. Hint: call "
    "batch(global batch size) on it."
)
OTHER_DATA = (
    "experimental_distribute_dataset: ranks {} read another dataset than rank 0: every rank takes "
    "its part of each global batch, so all must read the same ones, in the same order. Hint: give "
    "shuffle a seed (or call tf.random.set_seed) and list files in one order, or let each rank "
    "read its own with distribute_datasets_from_function."
)


def distributed(dataset: Any, group: Group) -> Any:
    """Cut every batch of a dataset to a rank's rows.

    Raises:
        TypeError: The argument is no dataset.
        ValueError: The dataset has no batches, or is not the same on all ranks.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"experimental_distribute_dataset: {type(dataset).__name__} is not a tf.data.Dataset. "
            "Hint: tf.data.Dataset.from_tensor_slices(arrays).batch(global batch size)"
        )
    for spec in tf.nest.flatten(dataset.element_spec):
        if getattr(spec, "shape", None) is not None and spec.shape.rank == 0:
            raise ValueError(NO_ROWS.format(spec))
    _compare(dataset, group)  # with one rank, too: it counts as an epoch of a shuffled dataset
    if group.world_size == 1:
        return dataset

    is_tuple = type(dataset.element_spec) is tuple  # map() passes its parts one by one

    def cut(*data: Any) -> Any:
        element = data if is_tuple else data[0]
        begin, end = _part(_rows(tf.nest.flatten(element)[0]), group)
        return tf.nest.map_structure(lambda leaf: rows_of(leaf, begin, end), element)

    return dataset.map(cut, tf.data.AUTOTUNE, deterministic=True).prefetch(tf.data.AUTOTUNE)


def _part(count: Any, group: Group) -> tuple[Any, Any]:
    return count * group.rank // group.world_size, count * (group.rank + 1) // group.world_size


def _rows(leaf: Any) -> Any:
    """Return a Python number if it is known, so that the shapes of parts are known as well."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    known = leaf.shape[0] if leaf.shape.rank else None
    return tf.shape(leaf, tf.int64)[0] if known is None else known


def rows_of(leaf: Any, begin: Any, end: Any) -> Any:
    """Return rows of a tensor, in memory of their own.

    TensorFlow uses a program's arrays without a copy and may compute in place on a slice of one;
    `tf.identity` shares the memory.
    """
    if isinstance(leaf, tf.Tensor):
        return tf.gather(leaf, tf.range(begin, end))
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[begin:end]
    shape = leaf.dense_shape
    begin, end = tf.cast(begin, tf.int64), tf.cast(end, tf.int64)
    begins = tf.concat([[begin], tf.zeros_like(shape[1:])], axis=0)
    return tf.sparse.slice(leaf, begins, tf.concat([[end - begin], shape[1:]], axis=0))


def _compare(dataset: Any, group: Group) -> None:
    """Check that all ranks have the same number of batches and the same first batch.

    Raises:
        ValueError: The ranks' datasets differ.
    """
    digests = group.exchange(_digest(dataset))
    others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise ValueError(OTHER_DATA.format(", ".join(others)))


def _digest(dataset: Any) -> bytes:
    made = hashlib.sha256(f"{dataset.element_spec} {int(dataset.cardinality())}".encode())
    for batch in dataset.take(1):
        for leaf in tf.nest.flatten(batch, expand_composites=True):
            made.update(tf.io.serialize_tensor(leaf).numpy())
    return made.digest()
