"""Keras on JAX: the jitted step calls the collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from sdp_plugins.jax.collectives import JaxCollectives, after

from ..batch_shard import BatchShard, factor_of
from ..steps import StatelessStep
from .base import Backend

if TYPE_CHECKING:
    from sdp_plugins.core import Group


_TRAINED = ("trainable_variables", "non_trainable_variables")
_MEASURED = ("metrics_variables",)


class JaxBackend(Backend):
    """The backend for JAX."""

    is_stateless = True

    def __init__(self, group: Group) -> None:
        self._collectives = JaxCollectives(group)
        self._turn: Any = None

    step = staticmethod(StatelessStep)

    def synchronize(self, model: Any) -> None:
        """Wait for the values of the step: JAX raises a failure only when a value is read.

        Within an epoch Keras' trainer holds the newest values, and the variables have none.
        """
        if (state := getattr(model, "_jax_state", None)) and not model._jax_state_synced:
            arrays = [array for part in state.values() for array in part or ()]  # typed by Keras
        else:
            arrays = [variable.value for variable in model.variables]
        jax.block_until_ready(arrays)

    def begin(self) -> None:
        """Start the order of a new step; the previous step's turns belong to another trace."""
        self._turn = jax.numpy.zeros((), jax.numpy.float32)

    def add_dependency(self, arrays: Sequence[Any]) -> None:
        """Make later operations wait for arrays: collectives in a branch return no turn."""
        self._turn = after(self._turn, arrays)

    def average_gradients(self, grads: Sequence[Any], shard: BatchShard | None) -> list[Any]:
        """Average gradients, last layers first."""
        factor = factor_of(shard)
        if factor == 0:
            grads = [jax.numpy.zeros_like(grad) for grad in grads]
        elif factor != 1:
            grads = [grad * jax.numpy.asarray(factor, grad.dtype) for grad in grads]
        averaged, turn = self._collectives.all_reduce(grads[::-1], "avg", self._turn)
        # Updates come after the whole backward pass: otherwise XLA copies each weight, which the
        # pass may still read. XLA multiplies by one in the same loop as it updates.
        one = 1 + 0 * turn
        return [grad * one.astype(grad.dtype) for grad in averaged[::-1]]

    def compiled(self, model: Any, step: str) -> Callable[..., Any]:
        """Compile a step that leaves its arguments as they are, unlike Keras' own."""
        method = getattr(model, step)

        def function(state: Any, data: Any) -> Any:  # new, or JAX takes what it compiled before
            return method(state, data)

        is_compiled = model.jit_compile and not model.run_eagerly
        run = jax.jit(function) if is_compiled else function
        return lambda state, data: jax.block_until_ready(run(state, data))

    def attach_state(self, model: Any, state: Any) -> None:
        """Have Keras write a step's state into the variables."""
        model._jax_state = _by_name(state)
        model._jax_state_synced = False
        model.jax_state_sync()

    def detach_state(self, model: Any, state: Any) -> Any:
        """Have Keras take a step's state from the variables."""
        names = dict.fromkeys(_by_name(state), True)
        state = model._get_jax_state(**names, purge_model_variables=True)
        model._jax_state, model._jax_state_synced = _by_name(state), False
        return state

    def average_accumulated_gradients(self, optimizer: Any, grads: Sequence[Any]) -> list[Any]:
        """Average in the last micro-step only: Keras clips in all, but discards other results."""
        micro_step = optimizer._iterations.value + 1
        return jax.lax.cond(  # type: ignore[no-any-return]
            micro_step % optimizer.gradient_accumulation_steps == 0,
            lambda grads: self.average_gradients(grads, None),
            list,
            list(grads),
        )

    def all_reduce(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the sum over ranks of each tensor."""
        totals, self._turn = self._collectives.all_reduce(tensors, "sum", self._turn)
        return totals

    def gather_rows(self, tensor: Any, shard: BatchShard) -> Any:
        """Gather all ranks' rows; their shapes are known at trace time."""
        whole, self._turn = self._collectives.all_gather(
            jax.lax.stop_gradient(tensor[: shard.rows]), shard.count, self._turn
        )
        return whole

    def read(self, variable: Any) -> Any:
        """Return the value itself: JAX arrays are immutable."""
        return variable.value

    def to_numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        """Convert with NumPy."""
        return np.asarray(tensor)

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Any:
        """Return the array itself: Keras concatenates with NumPy."""
        return array

    def global_batches(self, source: Any, seed: int) -> Any:
        """Return arrays of JAX."""
        return source.get_jax_iterator()

    def batches(self, adapter: Any) -> Any:
        """Return arrays of JAX."""
        return adapter.get_jax_iterator()


def _by_name(state: Any) -> dict[str, Any]:
    """Return the parts of the state of Keras' training steps, or of those of evaluations."""
    optimizer = ("optimizer_variables",) if len(state) > len(_TRAINED + _MEASURED) else ()
    return dict(zip((*_TRAINED, *optimizer, *_MEASURED), state, strict=True))
