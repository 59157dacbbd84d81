"""A callback that logs this rank's communication."""

from __future__ import annotations

from typing import Any

import keras

from sdp_plugins.core.communication_log import CommunicationLog

from .strategy import SMDDPStrategy


class SMDDPMonitor(keras.callbacks.Callback):
    """Adds to `logs` how much of the time goes to communication, and which rank others wait for.

    ::

        model.fit(..., callbacks=[SMDDPMonitor(strategy), keras.callbacks.TensorBoard()])

    At the end of a batch and of an epoch, `logs` get what `CommunicationLog.look` returns, of the
    time since the last one. Callbacks that stand behind this one see it, and so does the history.

    Args:
        strategy: Trains the model.
    """

    def __init__(self, strategy: SMDDPStrategy) -> None:
        super().__init__()
        self._strategy = strategy
        self._begin()

    def _begin(self) -> None:
        self._batch = CommunicationLog(self._strategy.group)
        self._epoch = CommunicationLog(self._strategy.group)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin to count."""
        self._begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Add what has happened since the last batch."""
        if self._batch.group is self._strategy.group:
            self._add(self._batch, logs)
        else:  # ranks were lost, or have joined
            self._begin()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add what has happened in the epoch, or since ranks were lost or have joined."""
        if self._epoch.group is self._strategy.group:
            self._add(self._epoch, logs)

    def _add(self, log: CommunicationLog, logs: Any) -> None:
        if logs is not None:
            logs.update(log.look())
