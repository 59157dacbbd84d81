"""The values of a model's variables: undone when a step is discarded, and told to other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import ops

from sdp_plugins.core import CollectiveMismatchError

from ..initial_sync import describe, seed_states, variables_of
from ..variables import optimizers_of

if TYPE_CHECKING:
    from ..context import TrainingContext


class ModelState:
    """A model's variables, and those of its optimizers and metrics.

    A step updates weights only when all ranks have reduced all gradients, and all weights then. So
    a step that fails has updated all of them, or none: what the optimizers count says which. Other
    variables, such as the sums of metrics, and numbers of optimizers are copied before a step.
    """

    def __init__(self, model: Any, context: TrainingContext) -> None:
        self._model, self._context = model, context
        self._copies: list[tuple[Any, Any]] = []
        self._counts: list[int] | None = None  # None while no step is under way

    def save(self) -> None:
        """Copy what a step changes before it updates weights; JAX keeps it itself."""
        if not self._context.backend.is_stateless:
            changed = (*self._numbers, *self._model.metrics_variables)
            self._copies = [
                (variable, self._context.backend.read(variable)) for variable in changed
            ]
            self._counts = self._read_counts()

    def keep(self) -> None:
        """The step is done; there is nothing to undo."""
        self._copies, self._counts = [], None

    def undo(self) -> bool:
        """Undo the step under way.

        Returns:
            Whether it has updated the weights. Then only its metrics are undone.
        """
        copies, counts = self._copies, self._counts
        self.keep()
        is_taken = counts is not None and self._read_counts() != counts
        measured = {id(variable) for variable in self._model.metrics_variables}
        for variable, value in copies:
            if not is_taken or id(variable) in measured:
                variable.assign(value)
        return is_taken

    def values(self) -> dict[str, Any]:
        """Return all values, for another rank; those of random generators are this rank's own."""
        return {
            "model": describe(self._model),
            "values": _arrays(self._shared()),
            "seeds": _arrays(seed_states(self._model)),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over another rank's values.

        Raises:
            CollectiveMismatchError: It has another model.
        """
        mine, theirs = describe(self._model), state["model"]
        variables = self._shared()
        if mine != theirs or len(variables) != len(state["values"]):
            differs = [pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]]
            here, there = differs[0] if differs else (len(mine), len(theirs))
            raise CollectiveMismatchError(
                f"{self._context.group.error_prefix}fit(): this process, which joins, has another "
                f"model: {here} here, {there} there. Hint: start the same program.",
                op="fit",
            )
        assign(variables, state["values"])

    def _shared(self) -> list[Any]:
        """The variables that have the same value on all ranks."""
        seeds = {id(state) for state in seed_states(self._model)}
        everything = (*variables_of(self._model), *self._model.metrics_variables)
        return [variable for variable in everything if id(variable) not in seeds]

    @cached_property
    def _optimizers(self) -> list[Any]:
        return optimizers_of(self._model)

    @cached_property
    def _numbers(self) -> list[Any]:
        """The variables, but for metrics', that a step changes and an optimizer's update does not.

        They are found once: to look through all layers takes too long for each step.
        """
        updated = {id(v) for v in self._model.trainable_variables}
        for optimizer in self._optimizers:
            updated |= {id(variable) for variable in optimizer.variables if variable.shape}
        return [variable for variable in variables_of(self._model) if id(variable) not in updated]

    def _read_counts(self) -> list[int]:
        return [int(ops.convert_to_numpy(optimizer.iterations)) for optimizer in self._optimizers]


def _arrays(variables: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    return [np.array(ops.convert_to_numpy(variable.value), order="C") for variable in variables]


def assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Assign a value to each variable."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
