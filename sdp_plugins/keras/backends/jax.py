"""Keras on JAX: collectives are calls inside of the jitted step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from sdp_plugins.jax.collectives import Collectives, after, first_turn

from ..batch_shard import BatchShard, factor_of
from ..steps import StatelessStep
from .base import Backend, Batches

if TYPE_CHECKING:
    from sdp_plugins.core import Group


class JaxBackend(Backend):
    """See ``Backend``."""

    is_stateless = True

    def __init__(self, group: Group) -> None:
        self._collectives = Collectives(group)
        self._turn: Any = None

    step = staticmethod(StatelessStep)

    def synchronize(self, model: Any) -> None:
        """JAX goes on while a step runs, or has failed, until somebody looks at what it makes.

        Within an epoch Keras' trainer holds the newest values, and the variables have none.
        """
        if (state := getattr(model, "_jax_state", None)) and not model._jax_state_synced:
            arrays = [array for part in state.values() for array in part or ()]  # of Keras' types
        else:
            arrays = [variable.value for variable in model.variables]
        jax.block_until_ready(arrays)

    def begin(self) -> None:
        """Take the first turn of a step; those of the last one belong to another trace."""
        self._turn = first_turn()

    def add_dependency(self, arrays: Sequence[Any]) -> None:
        """Have what follows wait for arrays: collectives in a branch pass on no turn."""
        self._turn = after(self._turn, arrays)

    def average(self, grads: Sequence[Any], shard: BatchShard | None) -> list[Any]:
        """Last layers first."""
        factor = factor_of(shard)
        if factor == 0:
            grads = [jax.numpy.zeros_like(grad) for grad in grads]
        elif factor != 1:
            grads = [grad * jax.numpy.asarray(factor, grad.dtype) for grad in grads]
        averaged, _ = self._collectives.all_reduce(grads[::-1], "avg", self._turn)
        return averaged[::-1]

    def average_of_update(self, optimizer: Any, grads: Sequence[Any]) -> list[Any]:
        """Keras clips in every micro-step here, and then drops what it has computed."""
        micro_step = optimizer._iterations.value + 1
        return jax.lax.cond(  # type: ignore[no-any-return]
            micro_step % optimizer.gradient_accumulation_steps == 0,
            lambda grads: self.average(grads, None),
            list,
            list(grads),
        )

    def total(self, tensors: Sequence[Any]) -> list[Any]:
        """The sums."""
        totals, self._turn = self._collectives.all_reduce(tensors, "sum", self._turn)
        return totals

    def gather_rows(self, tensor: Any, shard: BatchShard) -> Any:
        """Shapes are known."""
        whole, self._turn = self._collectives.all_gather(
            tensor[: shard.rows], shard.count, self._turn
        )
        return whole

    def compare(self, data: Any) -> Any:
        """Nothing: the host has seen to it."""
        return data

    def read(self, variable: Any) -> Any:
        """Values do not change."""
        return variable.value

    def to_numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        """By NumPy."""
        return np.asarray(tensor)

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Any:
        """The array itself: Keras concatenates by NumPy."""
        return array

    def data_of(self, adapter: Any) -> Any:
        """An iterable."""
        return Batches(adapter.get_jax_iterator)

    def example(self, adapter: Any) -> Any:
        """The first batch."""
        return next(iter(adapter.get_jax_iterator()))


def make(group: Group) -> JaxBackend:
    """The functions of this backend."""
    return JaxBackend(group)
