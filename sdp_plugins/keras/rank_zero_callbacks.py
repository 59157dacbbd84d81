"""Callbacks that write files, which only rank 0 may run."""

from __future__ import annotations

from collections.abc import Iterable
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


def for_rank(callbacks: Iterable[Any], rank: int) -> list[Any]:
    """Return the callbacks for a rank, also those in lists: rank 0 alone runs those that write."""
    chosen = []
    for each in callbacks:
        if isinstance(each, keras.callbacks.CallbackList):
            chosen += for_rank(each.callbacks, rank)
        elif rank == 0 or not isinstance(each, WRITERS):
            chosen.append(each)
    return chosen
