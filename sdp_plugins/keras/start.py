"""What happens before the first step: all ranks have the same model and the same values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from sdp_plugins.core import CollectiveMismatchError

from . import hooks
from .variables import broadcast, diversify

if TYPE_CHECKING:
    from .strategy import SMDDPStrategy


class Start(keras.callbacks.Callback):  # type: ignore[misc]
    """Comes after the program's own callbacks, which may have restored rank 0 from a backup."""

    def __init__(self, strategy: SMDDPStrategy) -> None:
        super().__init__()
        self._strategy = strategy

    def on_train_begin(self, logs: Any = None) -> None:
        """Compare, and copy from rank 0."""
        compare(self.model, self._strategy, "fit")
        equalize(self.model, self._strategy)
        epoch = np.array([self.model._initial_epoch or 0], np.int64)
        self._strategy.group.broadcast(epoch, 0)
        self.model._initial_epoch = int(epoch[0]) or None

    def on_test_begin(self, logs: Any = None) -> None:
        """The same before an evaluation."""
        compare(self.model, self._strategy, "evaluate")
        equalize(self.model, self._strategy)

    def on_predict_begin(self, logs: Any = None) -> None:
        """The same before a prediction."""
        compare(self.model, self._strategy, "predict")
        equalize(self.model, self._strategy)


def equalize(model: Any, strategy: SMDDPStrategy) -> None:
    """Copy all variables from rank 0; ranks then draw random numbers of their own."""
    broadcast(strategy.group, [*model.variables, *optimizer_variables(model)], 0)
    diversify(strategy.group.rank, seed_states(model))


def optimizer_variables(model: Any) -> list[Any]:
    """Of all optimizers that a model holds."""
    found: dict[int, Any] = {}
    for value in vars(model).values():
        if isinstance(value, hooks.BaseOptimizer):
            found.update((id(variable), variable) for variable in value.variables)
    return list(found.values())


def seed_states(model: Any) -> list[Any]:
    """State of every random generator in a model."""
    return [
        generator.state for layer in model._flatten_layers() for generator in layer._seed_generators
    ]


def compare(model: Any, strategy: SMDDPStrategy, call: str) -> None:
    """See that all ranks are about to train the same.

    Raises:
        CollectiveMismatchError: They are not; it names what differs first.
    """
    group = strategy.group
    mine = describe(model, call)
    everyones = [json.loads(text) for text in group.exchange(json.dumps(mine).encode())]
    for other, theirs in enumerate(everyones):
        if theirs == mine:
            continue
        here, there = next(
            (
                (a, b)
                for a, b in zip([*mine, "nothing"], [*theirs, "nothing"], strict=False)
                if a != b
            ),
        )
        raise CollectiveMismatchError(
            f"[rank {group.rank}/{group.world_size}] {call}: rank {other} has another model or "
            f"call: {there} there, {here} here. Hint: build and compile the same model on all "
            "ranks, and call the same methods in the same order.",
            ranks=(other,),
            op=call,
        )


def describe(model: Any, call: str) -> list[str]:
    """What must be equal, in the order in which to look for a difference."""
    lines = [f"{call}()"]
    lines += [
        f"{variable.path} {variable.dtype}{list(variable.shape)}"
        for variable in [*model.variables, *optimizer_variables(model)]
    ]
    return lines
