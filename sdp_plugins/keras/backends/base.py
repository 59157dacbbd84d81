"""The interface that each backend of Keras implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import ops

from ..batch_shard import DATA, cut, rows_to_read

if TYPE_CHECKING:
    from ..batch_shard import BatchShard


class Backend(ABC):
    """Inserts collectives into a backend's compiled code, and reads values from it.

    ``average_gradients``, ``all_reduce`` and ``gather_rows`` may be called while a step is traced;
    the collectives of a step then run in the order in which they were traced. The methods that are
    not abstract are correct for backends that need no action.
    """

    is_stateless = False
    is_atomic = False
    rows_to_read = staticmethod(rows_to_read)
    cut = staticmethod(cut)

    @abstractmethod
    def step(self, model: Any, context: Any) -> Any:
        """Return a ``StatefulStep`` or ``StatelessStep``."""

    def close(self) -> None:
        """Leave the models."""
        return

    def prepare(self, model: Any) -> None:
        """Reset compile options that this backend does not support, with a warning."""
        return

    def synchronize(self, model: Any) -> None:
        """Wait until a model's variables are computed.

        Failures of the step are raised here, and the host's next communication comes after the
        step.
        """
        return

    def begin(self) -> None:
        """Mark the start of tracing a step."""
        return

    def control_dependencies(self, batch: Any) -> AbstractContextManager[None]:
        """Return a context whose operations run only if a batch exists."""
        return nullcontext()

    def training(self, model: Any, shard: BatchShard | None) -> AbstractContextManager[None]:
        """Return a context for a training step on this shard of a batch."""
        return nullcontext()

    def add_dependency(self, arrays: Sequence[Any]) -> None:
        """Make later operations wait for the results of an optimizer's ``stateless_apply``."""
        return

    def compare(self, data: Any) -> Any:
        """Return the data of a cut batch after checking that it equals the other ranks'."""
        return data

    def error_of_step(self, op: str) -> Exception | None:
        """Return the error that this package has raised in a step, and a framework has wrapped.

        `op` is the method of the model that has failed.
        """
        return None

    @abstractmethod
    def average_gradients(self, grads: Sequence[Any], shard: BatchShard | None) -> list[Any]:
        """Return the mean of the ranks' gradients, each weighted by the factor of the rank's shard.

        No shard gives all ranks equal weight.
        """

    def update(
        self, apply: Callable[..., Any], optimizer: Any, grads: Sequence[Any], variables: Any
    ) -> Any:
        """Call an optimizer's ``apply``, which averages the gradients before it uses them."""
        return apply(grads, variables)

    def average_accumulated_gradients(self, optimizer: Any, grads: Sequence[Any]) -> list[Any]:
        """Average gradients that an optimizer accumulates, if it is about to use them.

        Keras calls this in updates only, except on JAX.
        """
        return self.average_gradients(grads, None)

    def check_same_gradients(  # noqa: B027  other backends notice, or have none missing
        self, grads: Sequence[Any], variables: Sequence[Any] | None
    ) -> None:
        """Check that the same gradients are None on all ranks.

        Raises:
            CollectiveMismatchError: They are not.
        """

    @abstractmethod
    def all_reduce(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the sum over ranks of each tensor."""

    def all_reduce_with_gradient(self, tensors: Sequence[Any], shard: BatchShard) -> Sequence[Any]:
        """Return the sum over ranks, with sums as gradients, for a step on this shard of a batch.

        Synchronized moments need it, which Keras has on TensorFlow only.
        """
        raise NotImplementedError

    @abstractmethod
    def gather_rows(self, tensor: Any, shard: BatchShard) -> Any:
        """Return all ranks' rows of a tensor of a batch, without a gradient."""

    def length(self, tensor: Any) -> Any:
        """Return the number of rows: an integer if the shape is known, else a tensor."""
        return int(tensor.shape[0])

    @abstractmethod
    def read(self, variable: Any) -> Any:
        """Return a variable's value, which later assignments do not change."""

    def elements(self, variable: Any, part: slice) -> np.ndarray[Any, Any]:
        """Return elements of a flattened variable, perhaps in its memory: read them at once."""
        return np.ravel(self.to_numpy(variable.value))[part]

    def to_numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        """Return a tensor's value."""
        return ops.convert_to_numpy(tensor)

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Any:
        """Convert an array to the return type of this backend's predict functions."""
        return ops.convert_to_tensor(array)

    @abstractmethod
    def global_batches(self, source: Any, seed: int) -> Any:
        """Return the global batches of one of Keras' adapters, of anything but arrays.

        Samplers of torch that have no generator draw by the seed, so the same on all ranks.
        """

    def array_dataset(self, arrays: Any, indices: Callable[[], Iterator[tuple[Any, int]]]) -> Any:
        """Return a ``tf.data.Dataset`` of cut batches of arrays, by an epoch's indices."""
        raise NotImplementedError

    def cut_dataset(self, dataset: Any, rank: int, world_size: int) -> Any:
        """Return a ``tf.data.Dataset`` of a rank's rows of each batch."""
        raise NotImplementedError

    @abstractmethod
    def batches(self, adapter: Any) -> Any:
        """Return the cut batches of an epoch."""

    def array_batches(self, adapter: Any) -> Any:
        """Return the cut batches of an adapter of arrays, each read when it is asked for."""
        return self.batches(adapter)

    def endless_dataset(self) -> Any:
        """Return a ``tf.data.Dataset`` of nothing."""
        raise NotImplementedError

    # ---- elastic trainings ---------------------------------------------------------------------

    @abstractmethod
    def compiled(self, model: Any, step: str) -> Callable[..., Any]:
        """Return a function of a cut batch that runs one of the model's steps, to its end."""

    def attach_state(self, model: Any, state: Any) -> None:
        """Give the variables the values that a step has as its argument."""
        return

    def detach_state(self, model: Any, state: Any) -> Any:
        """Return the variables' values as a step's argument, in the place of a former one."""
        return state

    def after_updates(self, model: Any) -> AbstractContextManager[None]:
        """Return a context whose operations run after the weights' update."""
        return nullcontext()

    def data_of(self, adapter: Any) -> Any:
        """Return this rank's rows of every batch, for custom loops; each iteration is an epoch."""
        return _Rows(self, adapter)

    def example(self, adapter: Any) -> Any:
        """Return a cut batch, or its shapes."""
        return next(iter(self.batches(adapter)))


@dataclass(frozen=True)
class _Rows:
    backend: Backend
    adapter: Any

    def __iter__(self) -> Iterator[Any]:
        return (data[DATA] for data in self.backend.batches(self.adapter))
