"""Callbacks for a model whose optimizer is a ``DistributedOptimizer``."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from sdp_plugins.tensorflow.functions import broadcast_variables
from sdp_plugins.tensorflow.job import current


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Copies one rank's model and optimizer to all ranks after the first batch."""

    def __init__(self, root_rank: int = 0) -> None:
        """Set the rank to copy from."""
        super().__init__()
        self._root_rank = root_rank
        self._done = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Copy after the first batch: optimizers create their variables in the first step."""
        if not self._done:
            self._done = True
            variables = self.model.optimizer.variables
            variables = variables() if callable(variables) else variables  # Keras 2 and 3
            broadcast_variables([*self.model.variables, *variables], self._root_rank)


class MetricAverageCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the numbers in an epoch's logs over the ranks, for the callbacks that follow."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the logs in place; their names must be equal on all ranks."""
        names = sorted(name for name, value in (logs or {}).items() if np.ndim(value) == 0)
        if logs and names:
            values = np.array([float(logs[name]) for name in names])
            current.collectives.group.all_reduce(values, "avg")
            logs.update(zip(names, values.tolist(), strict=True))
