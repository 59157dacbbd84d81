"""Global batches by their number, cut for the ranks that are there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from sdp_plugins.core import CollectiveMismatchError

from .. import keras_internals
from ..batch_shard import OTHER_BATCHES, first_leaf
from ..data import ARRAYS_HINT, ArrayShards, BatchShards, ends, some_rows

if TYPE_CHECKING:
    from ..context import TrainingContext


class ElasticData(keras_internals.DataAdapter):
    """Yields a part of any batch of an epoch, as often as it is asked for.

    A global batch stays the same when the ranks change, so each of its rows is used once.

    Args:
        shards: Cuts the batches.
        context: Of the strategy.

    Attributes:
        batch: The global batch at the present place.

    Raises:
        ValueError: The data has no known number of batches.
    """

    def __init__(self, shards: ArrayShards | BatchShards, context: TrainingContext) -> None:
        if not shards.num_batches or shards.num_batches == float("inf"):
            raise ValueError(
                "elastic=True needs data with a known number of batches, so that a rank that "
                "joins finds its place in them. Hint: pass arrays, a PyDataset, a DataLoader, or a "
                "tf.data.Dataset without repeat()."
            )
        self._shards, self._context = shards, context
        self._epoch = self._index = -1
        self._has_begun = False  # before Keras' own `fit`, in a process that joins
        self._batches: Iterator[Any] = iter(())
        self.batch: Any = None
        self._parts: Iterator[Any] | None = None  # of arrays

    def at(self, epoch: int, index: int) -> Any:
        """Return this rank's part of a batch."""
        if epoch != self._epoch or index < self._index:
            if isinstance(self._shards, BatchShards) and self._shards.ordered is not None:
                self._shards.ordered.begin_epoch(self._shards.seed, epoch)
            self._batches, self._epoch = self._shards.global_batches(epoch), epoch
            self._index = -1
        while self._index < index:
            self.batch = next(self._batches)
            self._index += 1
        if isinstance(self._shards, BatchShards):
            return self._shards.cut(self.batch)
        if self._parts is None:
            self._shards.indices = self._wanted  # type: ignore[method-assign]
            self._parts = iter(self._context.backend.array_batches(self._shards))
        return next(self._parts)

    def _wanted(self) -> Iterator[tuple[Any, int]]:
        """Yield this rank's indices of the batch that is wanted, again and again."""
        assert isinstance(self._shards, ArrayShards)
        while True:
            yield self._shards.cut(self.batch)

    @property
    def place(self) -> tuple[int, int]:
        """The epoch, and the number of the present batch in it."""
        return self._epoch, self._index

    # ---- a rank that joins ---------------------------------------------------------------------

    def state(self) -> tuple[int, bytes]:
        """Return the seed of shuffles, and a hash of what the present batch is of."""
        arrays = isinstance(self._shards, ArrayShards)
        rows = some_rows(self._shards) if arrays else ends(first_leaf(self.batch))
        return self._shards.seed, hashlib.sha256(rows).digest()

    def go_to(self, epochs: int, epoch: int, index: int, state: tuple[int, bytes]) -> None:
        """Go to the present batch of another rank, which has finished some epochs in this fit.

        Raises:
            CollectiveMismatchError: It has other data there.
        """
        self._shards.seed, theirs = state
        self.on_epoch_end()  # as Keras does before it begins, so not again when it does here
        self._has_begun = True
        for _ in range(epochs):
            self.on_epoch_begin()
            if isinstance(self._shards, BatchShards):  # a tf.data.Dataset may shuffle each time
                next(self._shards.global_batches(0), None)
            self._shards.on_epoch_end()
        self.at(epoch, index)
        if self.state()[1] != theirs:
            text = OTHER_BATCHES.format("this process, which joins,")
            if isinstance(self._shards, ArrayShards):
                text = f"this process, which joins, has passed other arrays. {ARRAYS_HINT}"
            raise CollectiveMismatchError(f"{self._context.group.error_prefix}{text}", op="fit")

    # ---- what Keras asks of an adapter ---------------------------------------------------------

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Return nothing, endlessly: ``fit`` reads no data through Keras."""
        return repeat(None)

    get_jax_iterator = get_torch_dataloader = get_numpy_iterator

    def get_tf_dataset(self) -> Any:
        """Return a dataset of nothing, endlessly."""
        return self._context.backend.endless_dataset()

    num_batches = property(attrgetter("_shards.num_batches"))
    batch_size = property(attrgetter("_shards.batch_size"))
    has_partial_batch = property(attrgetter("_shards.has_partial_batch"))
    partial_batch_size = property(attrgetter("_shards.partial_batch_size"))
    on_epoch_begin = property(attrgetter("_shards.on_epoch_begin"))

    def on_epoch_end(self) -> None:
        """Tell the source, which may shuffle."""
        if self._has_begun:
            self._has_begun = False
        else:
            self._shards.on_epoch_end()
