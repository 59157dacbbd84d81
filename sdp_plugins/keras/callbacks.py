"""Callbacks with the names and semantics of Horovod's.

``fit`` under a strategy broadcasts variables and computes global metrics automatically. These
callbacks cover the rest: values that a program's own callbacks add to the logs, variables that they
change, and learning rates that grow with the number of ranks.
"""

from __future__ import annotations

from typing import Any

import keras

from sdp_plugins.core.averages import average_numbers

from .context import TrainingContext
from .initial_sync import variables_of
from .model_patch import attached_to
from .variables import broadcast


def context_of(callback: Any) -> TrainingContext:
    """Return the training context of a callback's model.

    Raises:
        RuntimeError: No strategy trains the model.
    """
    context = attached_to(callback.model)
    if context is None:
        raise RuntimeError(
            f"{type(callback).__name__}: model '{callback.model.name}' has no strategy. Hint: call "
            "compile() inside of `with strategy.scope():`."
        )
    return context


class BroadcastVariables(keras.callbacks.Callback):  # type: ignore[misc]
    """Copies a rank's model and optimizer to all ranks after the first batch of a ``fit``."""

    def __init__(self, root: int = 0) -> None:
        """Set the rank to copy from.

        Args:
            root: The rank.
        """
        super().__init__()
        self._root = root
        self._done = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Reset, so that the next batch is the first."""
        self._done = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Copy after the first batch."""
        if not self._done:
            self._done = True
            context = context_of(self)
            context.synchronize()
            broadcast(context.group, variables_of(self.model), self._root)


class MetricAverage(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages all numbers in an epoch's logs over the ranks, for the callbacks that follow."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the logs in place."""
        context = context_of(self)
        context.synchronize()
        average_numbers(context.group, logs)


class LearningRateWarmup(keras.callbacks.Callback):  # type: ignore[misc]
    """Raises the learning rate from 1/N of its value to the full value on N ranks.

    Goyal et al., "Accurate, Large Minibatch SGD", 2017. The rate after b batches of epoch e, with s
    batches in an epoch, is ``initial_lr / N * (1 + (e + b / s) * (N - 1) / warmup_epochs)``.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """Set the schedule.

        Args:
            initial_lr: The final rate, for the global batch.
            warmup_epochs: The duration of the warmup in epochs.
            steps_per_epoch: Batches in an epoch; None takes the number from ``fit``.
            verbose: 1 prints the rate when it is reached.
        """
        super().__init__()
        self._initial_lr = initial_lr
        self._warmup_epochs = warmup_epochs
        self._steps_per_epoch = steps_per_epoch
        self._verbose = verbose
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Determine the length of an epoch.

        Raises:
            ValueError: The length is unknown.
        """
        self._steps_per_epoch = self._steps_per_epoch or self.params.get("steps")
        if not self._steps_per_epoch:
            raise ValueError(
                "LearningRateWarmup: the length of an epoch is not known. Hint: pass "
                "steps_per_epoch."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of this batch."""
        assert self._steps_per_epoch
        epochs = self._epoch + batch / self._steps_per_epoch
        if epochs <= self._warmup_epochs:
            ranks = context_of(self).world_size
            growth = 1 + epochs * (ranks - 1) / self._warmup_epochs
            self.model.optimizer.learning_rate = self._initial_lr / ranks * growth

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the exact rate at the end of the warmup, and print it if verbose."""
        if self._warmup_epochs - 1 <= epoch < self._warmup_epochs:
            self.model.optimizer.learning_rate = self._initial_lr
            if self._verbose and context_of(self).rank == 0:
                print(f"epoch {epoch + 1}: the learning rate has reached {self._initial_lr:g}")
