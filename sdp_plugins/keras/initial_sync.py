"""The steps before training: all ranks get the same model and the same values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from sdp_plugins.core import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError

from .rank_consistency import Progress, check_epoch_end, check_weights, exchange
from .variables import broadcast, diversify, optimizers_of

if TYPE_CHECKING:
    from sdp_plugins.core import Group

    from .context import TrainingContext

_NEXT = "_smddp_next_part"  # of a model's weights to compare; absent before the first call


class InitialSync(keras.callbacks.Callback):  # type: ignore[misc]
    """Runs after the program's own callbacks, which may have restored rank 0 from a backup."""

    def __init__(self, context: TrainingContext) -> None:
        super().__init__()
        # Counting steps must not make Keras wait for each one, except on JAX: there Keras reads a
        # step's logs in another thread, after the next step has taken their memory.
        self.async_safe = not context.backend.is_stateless
        self._context = context
        self._in_fit = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Compare the models, and copy values from rank 0."""
        self._in_fit = True
        self._context.progress = Progress("fit")
        sync(self.model, self._context, "fit")
        epoch = np.array([self.model._initial_epoch or 0], np.int64)
        self._context.group.broadcast(epoch, 0)
        self.model._initial_epoch = int(epoch[0]) or None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Reset the step count."""
        self._context.progress = Progress("fit", epoch + 1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the step; this callback comes after those that may stop training."""
        progress = self._context.progress
        progress.steps = batch + 1
        progress.stop = progress.ended = bool(self.model.stop_training)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compare ``stop_training`` and the weights, which callbacks may have changed."""
        self._end_steps()
        context = self._context
        check_epoch_end(self.model, context.group, context.backend, context.progress)

    def on_test_begin(self, logs: Any = None) -> None:
        """Synchronize before a separate evaluation, if it is needed."""
        if self._in_fit:
            self._end_steps()
        else:
            sync_once(self.model, self._context, "evaluate")

    def on_train_end(self, logs: Any = None) -> None:
        """Mark the end of ``fit``: later evaluations are separate calls."""
        self._in_fit = False

    def _end_steps(self) -> None:
        self._context.backend.synchronize(self.model)  # failures up to here belong to a step
        self._context.progress.ended = True
        self._context.progress.stop = bool(self.model.stop_training)

    def on_predict_begin(self, logs: Any = None) -> None:
        """Synchronize before a prediction, if it is needed."""
        sync_once(self.model, self._context, "predict")


def sync(model: Any, context: TrainingContext, call: str) -> None:
    """Start a ``fit``; some ranks may have loaded weights since the last one."""
    compare(model, context, call)
    broadcast(context.group, variables_of(model), 0)
    diversify(context.rank, seed_states(model))  # each rank draws its own random numbers
    object.__setattr__(model, _NEXT, 0)


def sync_once(model: Any, context: TrainingContext, call: str, elements: int = 0) -> None:
    """Synchronize a model at its first call; ranks may have drawn or loaded different values.

    Later calls only compare: equal models are trained alike, so different values are a mistake.
    They compare about `elements` elements of the weights, in turn; 0 compares all.
    """
    begin = vars(model).get(_NEXT)
    if begin is None:
        sync(model, context, call)
        return
    following = check_weights(
        model, context.group, context.backend, call, begin if elements else 0, elements
    )
    object.__setattr__(model, _NEXT, following)


def check_same_call(group: Group, call: str) -> int:
    """Check that all ranks make the same call.

    Returns:
        A shuffle seed from rank 0's NumPy generator, from which Keras would draw it as well.

    Raises:
        CollectiveMismatchError: The calls differ.
        CollectiveTimeoutError: Ranks did not call in time.
        PeerLostError: Ranks have ended instead.
    """
    try:
        seeds = exchange(group, call, np.random.randint(2**31) if group.rank == 0 else 0)
    except (CollectiveTimeoutError, PeerLostError) as error:
        if error.kind != "aborted" and not error.is_repeat:  # else the text has the cause
            text = f"With a strategy, all ranks must call {call}(), as each computes a part"
            error.args = (f"{error} {text}: call it on all, and print on rank 0.",)
        raise
    return int(seeds[0])


def variables_of(model: Any) -> list[Any]:
    """Return the variables of a model and of all optimizers in it."""
    found = {id(variable): variable for variable in model.variables}
    for optimizer in optimizers_of(model):
        found.update((id(variable), variable) for variable in optimizer.variables)
    return list(found.values())


def seed_states(model: Any) -> list[Any]:
    """Return the state of every random generator in a model."""
    return [
        generator.state for layer in model._flatten_layers() for generator in layer._seed_generators
    ]


def compare(model: Any, context: TrainingContext, call: str) -> None:
    """Check that all ranks are about to train the same model.

    Raises:
        CollectiveMismatchError: The calls differ, or the models; the message names the first
            difference.
    """
    group = context.group
    mine = describe(model)
    for other, theirs in enumerate(exchange(group, call, mine)):
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
            f"{group.error_prefix}{call}(): rank {other} has another model: "
            f"{there} there, {here} here. Hint: build and compile the same model on all ranks.",
            ranks=(other,),
            op=call,
        )


def describe(model: Any) -> list[str]:
    """Return a model's variables and the settings of its optimizers."""
    trained = {id(variable) for variable in model.trainable_variables}
    lines = [
        f"{variable.path} {variable.dtype}{list(variable.shape)}"
        + ("" if id(variable) in trained else " (not trained)")
        for variable in variables_of(model)
    ]
    for optimizer in optimizers_of(model):
        for name, value in sorted(optimizer.get_config().items()):
            if isinstance(value, dict):  # for example a schedule
                value = json.dumps(value, sort_keys=True, default=str)
            elif name == "learning_rate":
                continue  # a variable, which gets rank 0's value
            if isinstance(value, (int, float, str)) and name != "name":
                lines.append(f"{type(optimizer).__name__} {name}={value!r}")
    return lines
