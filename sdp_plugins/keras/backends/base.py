"""What each backend of Keras implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import ops

from ..batch_shard import DATA, cut, rows_to_read

if TYPE_CHECKING:
    from ..batch_shard import BatchShard


class Backend(ABC):
    """How collectives get into a backend's compiled code, and values out of it.

    ``average``, ``total`` and ``gather_rows`` may be called where a step is traced; the collectives
    of a step then run in the order in which they were traced. What is not abstract is right where
    nothing has to be done.
    """

    is_stateless = False

    @abstractmethod
    def step(self, model: Any, context: Any) -> Any:
        """A ``StatefulStep`` or ``StatelessStep``."""

    def prepare(self, model: Any) -> None:
        """Undo what a model was compiled with that cannot be had here, and say so."""
        return

    def synchronize(self, model: Any) -> None:
        """Wait until a model's variables are computed.

        So a failure is raised here, and what the host communicates next comes after the step.
        """
        return

    def begin(self) -> None:
        """A step begins to be traced."""
        return

    def once_read(self, batch: Any) -> AbstractContextManager[None]:
        """What is computed inside of the block is not, if there is no batch any more."""
        return nullcontext()

    def training(self, model: Any, shard: BatchShard | None) -> AbstractContextManager[None]:
        """Inside of the block runs a training step on this shard of a batch."""
        return nullcontext()

    def add_dependency(self, arrays: Sequence[Any]) -> None:
        """What comes after an optimizer's ``stateless_apply`` must wait for its results."""
        return

    def compare(self, data: Any) -> Any:
        """Data of a batch that was cut, once it is known to be the other ranks', too."""
        return data

    def translate_error(self, error: Exception) -> str | None:
        """What to tell of a failure that a framework has wrapped."""
        return None

    @abstractmethod
    def average(self, grads: Sequence[Any], shard: BatchShard | None) -> list[Any]:
        """The ranks' mean of gradients, each rank's times the factor of its shard.

        Args:
            grads: Of this rank.
            shard: Of the batch that they are of; None: all ranks' count the same.
        """

    def average_of_update(self, optimizer: Any, grads: Sequence[Any]) -> list[Any]:
        """The same where an optimizer accumulates, if it is about to use them.

        Keras calls this in updates only, but on JAX.
        """
        return self.average(grads, None)

    @abstractmethod
    def total(self, tensors: Sequence[Any]) -> list[Any]:
        """The sum over ranks of each tensor."""

    def total_with_gradient(self, tensors: Sequence[Any], shard: BatchShard) -> Sequence[Any]:
        """The sum over ranks, also of gradients, for a step on this shard of a batch.

        Synchronized moments need it, which Keras has on TensorFlow only.
        """
        raise NotImplementedError

    @abstractmethod
    def gather_rows(self, tensor: Any, shard: BatchShard) -> Any:
        """All ranks' rows of a tensor of a batch."""

    def length(self, tensor: Any) -> Any:
        """Rows of a tensor: an integer if the shape is known, else a tensor."""
        return int(tensor.shape[0])

    def rows_to_read(self, count: Any, rank: int, world_size: int) -> tuple[Any, Any]:
        """See ``batch_shard.rows_to_read``."""
        return rows_to_read(count, rank, world_size)

    def cut(self, data: Any, begin: Any, length: Any) -> Any:
        """Rows of every tensor of a batch, in memory that a step may write."""
        return cut(data, begin, length)

    @abstractmethod
    def read(self, variable: Any) -> Any:
        """The value of a variable, which later assignments do not change."""

    def to_numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        """A tensor's value."""
        return ops.convert_to_numpy(tensor)

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Any:
        """What predict functions of this backend return."""
        return ops.convert_to_tensor(array)

    def in_seeded_order(self, loader: Any, seed: int) -> Any:
        """Iterate over a DataLoader, whose samplers draw the same order on all ranks."""
        return iter(loader)

    def array_dataset(self, arrays: Any, indices: Callable[[], Iterator[tuple[Any, int]]]) -> Any:
        """A ``tf.data.Dataset`` of cut batches of arrays, by an epoch's indices."""
        raise NotImplementedError

    def cut_dataset(self, dataset: Any, rank: int, world_size: int) -> Any:
        """A ``tf.data.Dataset`` of a rank's rows of each batch."""
        raise NotImplementedError

    @abstractmethod
    def data_of(self, adapter: Any) -> Any:
        """The batches of an adapter, for loops of one's own."""

    @abstractmethod
    def example(self, adapter: Any) -> Any:
        """A batch of an adapter, or its shapes."""


class Batches:
    """This rank's part of every batch; each iteration is an epoch."""

    def __init__(self, begin: Callable[[], Iterable[Any]]) -> None:
        """Take cut batches from what a function returns."""
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        return (data[DATA] for data in self._begin())
