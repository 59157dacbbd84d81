"""Callbacks that write files, which only rank 0 may run."""

from __future__ import annotations

from typing import Any

import keras

WRITERS = (
    keras.callbacks.BackupAndRestore,  # restores on rank 0; the other ranks get rank 0's values
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def for_rank(callbacks: Any, rank: int) -> list[Any]:
    """Return the callbacks for a rank: rank 0 alone runs those that write."""
    return [each for each in flat(callbacks) if rank == 0 or not isinstance(each, WRITERS)]


def flat(callbacks: Any) -> list[Any]:
    """Return callbacks, also those in lists, or in Keras' list of callbacks."""
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return flat(callbacks.callbacks)
    if isinstance(callbacks, keras.callbacks.Callback):
        return [callbacks]
    return [each for nested in keras.tree.flatten(callbacks) for each in flat(nested)]
