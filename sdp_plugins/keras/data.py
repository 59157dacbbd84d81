"""Global batches, of which every rank reads its own rows.

Keras' own adapters read every data source; the adapters here wrap them and cut the batches. Arrays
are indexed with this rank's rows only. From any other source every rank reads whole batches, which
must be the same on all ranks: an unseeded shuffle would train on some rows twice and never on
others. The ranks therefore compare them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from sdp_plugins.core import CollectiveMismatchError, Group

from . import keras_internals
from .batch_shard import OTHER_BATCHES, cut, first_leaf, mark

if TYPE_CHECKING:
    from .context import TrainingContext

COMPARED_ROWS = 8  # of every array, at equal distances
ARRAYS_HINT = (
    "Hint: pass the whole arrays on all ranks; each takes its part of every batch, and batch_size "
    "is that of all ranks."
)


def whole(count: int) -> np.ndarray[Any, Any]:
    """Return an empty array with `count` rows."""
    return np.empty((count, 0), np.bool_)


class ArrayShards(keras_internals.ArrayDataAdapter):
    """Reads arrays; all ranks draw the same order."""

    def __init__(self, arrays: Any, context: TrainingContext, seed: int) -> None:
        self.__dict__.update(arrays.__dict__)
        self._context = context
        self.seed = seed
        self._epoch = 0

    def indices(self) -> Iterator[tuple[Any, int]]:
        """Yield this rank's indices and the size of the global batch for each batch of an epoch."""
        self._epoch += 1
        return map(self.cut, self.global_batches(self._epoch - 1))

    def global_batches(self, epoch: int) -> Iterator[Any]:
        """Yield the indices of each global batch of an epoch."""
        random = np.random.default_rng((self.seed, epoch))
        order: Any = range(self._num_samples)
        if self._shuffle and self._shuffle != "batch":
            order = random.permutation(self._num_samples)
        for first in range(0, self._num_samples, self._batch_size):
            batch = order[first : first + self._batch_size]
            yield first + random.permutation(len(batch)) if self._shuffle == "batch" else batch

    def cut(self, batch: Any) -> tuple[Any, int]:
        """Return this rank's indices of a global batch, and the batch's size."""
        begin, length = self._context.rows_to_read(len(batch))
        mine = batch[begin : begin + length]
        return (slice(mine.start, mine.stop) if isinstance(mine, range) else mine), len(batch)

    def _get_iterator(self, slice_and_convert_fn: Callable[..., Any], inputs: Any) -> Iterator[Any]:
        for indices, count in self.indices():
            take = partial(slice_and_convert_fn, indices=indices)
            yield mark(keras_internals.map_leaves(take, inputs), whole(count))

    def get_tf_dataset(self) -> Any:
        """Return a ``tf.data.Dataset`` of cut batches."""
        return self._context.backend.array_dataset(self._inputs, self.indices)

    def get_torch_dataloader(self) -> Iterator[Any]:
        """Return an iterator over cut batches."""
        inputs = keras_internals.array_slicing.convert_to_sliceable(
            self._inputs, target_backend="torch"
        )
        return self._get_iterator(
            lambda array, indices: ops.convert_to_tensor(
                array.convert_to_torch_compatible(array[indices])
            ),
            inputs,
        )


class BatchShards(keras_internals.DataAdapter):
    """Reads any other source and cuts each batch after reading it.

    Attributes:
        ordered: The source, if it is a PyDataset that this package shuffles.
    """

    ordered: InOneOrder | None = None

    def __init__(self, source: Any, context: TrainingContext, seed: int) -> None:
        self._source = source
        self._context = context
        self.seed = seed
        self._epoch = 0
        self._compared = False

    def _cut(self, batches: Any) -> Iterator[Any]:
        for data in batches:
            if not self._compared:  # only the first batch, before any step runs
                self._compared = True
                compare_batches(self._context.group, data)
            yield self.cut(data)

    def cut(self, data: Any) -> dict[str, Any]:
        """Return this rank's rows of a global batch."""
        count = int(first_leaf(data).shape[0])
        return mark(cut(data, *self._context.rows_to_read(count)), whole(count))

    def global_batches(self, epoch: int) -> Iterator[Any]:
        """Yield each global batch of an epoch; samplers without a generator draw by its number."""
        seed = int(np.random.default_rng((self.seed, epoch)).integers(2**31))
        return iter(self._context.backend.global_batches(self._source, seed))

    def get_jax_iterator(self) -> Iterator[Any]:
        """Return an iterator over cut batches."""
        return self._cut(self.global_batches(0))

    def get_torch_dataloader(self) -> Iterator[Any]:
        """Iterate over cut batches; samplers without a generator draw the same on all ranks."""
        self._epoch += 1
        return self._cut(self.global_batches(self._epoch))

    def get_tf_dataset(self) -> Any:
        """Return a ``tf.data.Dataset`` of cut batches."""
        context = self._context
        dataset = self._source.get_tf_dataset()
        return context.backend.cut_dataset(dataset, context.rank, context.world_size)

    # Whatever else Keras asks an adapter is asked of the source.
    num_batches = property(attrgetter("_source.num_batches"))
    batch_size = property(attrgetter("_source.batch_size"))
    has_partial_batch = property(attrgetter("_source.has_partial_batch"))
    partial_batch_size = property(attrgetter("_source.partial_batch_size"))
    on_epoch_begin = property(attrgetter("_source.on_epoch_begin"))
    on_epoch_end = property(attrgetter("_source.on_epoch_end"))


class InOneOrder(keras.utils.PyDataset):  # type: ignore[misc]
    """A PyDataset whose batches have a new order in every epoch, the same on all ranks.

    Keras would draw the order from Python's global generator.
    """

    def __init__(self, source: Any, seed: int) -> None:
        super().__init__(workers=source.workers, max_queue_size=source.max_queue_size)
        self._source = source
        self.begin_epoch(seed, 0)

    def __getitem__(self, index: int) -> Any:
        return self._source[self._order[index]]

    num_batches = property(attrgetter("_source.num_batches"))
    on_epoch_begin = property(attrgetter("_source.on_epoch_begin"))

    def on_epoch_end(self) -> None:
        """Notify the source, and draw the next order."""
        self._source.on_epoch_end()
        self.begin_epoch(self._seed, self._epoch + 1)

    def begin_epoch(self, seed: int, epoch: int) -> None:
        """Draw the order of an epoch."""
        self._seed, self._epoch = seed, epoch
        random = np.random.default_rng((seed, epoch))
        self._order = random.permutation(self.num_batches).tolist()


def in_one_order(dataset: Any, seed: int) -> tuple[Any, bool]:
    """Return the PyDataset to shuffle, and whether Keras has to shuffle it.

    Worker processes would not get a new order, and an infinite source has no order.
    """
    batches = dataset.num_batches
    if dataset.use_multiprocessing or batches is None or batches == float("inf"):
        return dataset, True
    return InOneOrder(dataset, seed), False


def compare_batches(group: Group, data: Any) -> None:
    """Check by first and last row that all ranks have read the same global batch.

    Raises:
        CollectiveMismatchError: The batches differ.
    """
    others = _others(group, ends(first_leaf(data)))
    if others:
        text = OTHER_BATCHES.format(f"rank {others[0]}")
        raise CollectiveMismatchError(f"{group.error_prefix}{text}", ranks=others, op="fit")


def compare_arrays(group: Group, arrays: Any) -> None:
    """Check by length and some rows that all ranks have passed the same arrays.

    Raises:
        CollectiveMismatchError: The arrays differ.
    """
    others = _others(group, some_rows(arrays))
    if others:
        raise CollectiveMismatchError(
            f"{group.error_prefix}rank {others[0]} has passed other arrays than this one "
            f"({arrays._num_samples} rows, batch_size {arrays._batch_size}). {ARRAYS_HINT}",
            ranks=others,
            op="fit",
        )


def some_rows(arrays: Any) -> bytes:
    """Return the length of arrays, the size of batches, and some rows."""
    count = arrays._num_samples
    leaves = [leaf for leaf in keras.tree.flatten(arrays._inputs) if leaf is not None]
    rows = [count * step // COMPARED_ROWS for step in range(1, COMPARED_ROWS)]
    found = [f"{count} {arrays._batch_size} ".encode()]
    for leaf in leaves:
        found += [ends(leaf), *(ends(leaf[row : row + 1]) for row in rows)]
    return b"".join(found)


def ends(leaf: Any) -> bytes:
    """Return the first and the last row of a tensor, with its shape; nothing if it is sparse."""
    try:
        rows = np.ascontiguousarray(np.concatenate([np.asarray(leaf[:1]), np.asarray(leaf[-1:])]))
    except (TypeError, ValueError, KeyError, IndexError):  # a sparse or empty array
        return b""
    return f"{rows.shape} {rows.dtype} ".encode() + rows.tobytes()


def _others(group: Group, mine: bytes) -> tuple[int, ...]:
    """Return the ranks whose bytes differ from this rank's."""
    digests = group.exchange(hashlib.sha256(mine).digest())
    return tuple(rank for rank, digest in enumerate(digests) if digest != digests[group.rank])


def shard_data(source: Any, context: TrainingContext, seed: int) -> Any:
    """Wrap one of Keras' adapters so that it yields this rank's rows; idempotent.

    The seed, the same on all ranks, is for shuffling.
    """
    if isinstance(source, (ArrayShards, BatchShards)):
        return source
    if type(source) is keras_internals.ArrayDataAdapter:
        compare_arrays(context.group, source)
        return ArrayShards(source, context, seed)
    return BatchShards(source, context, seed)
