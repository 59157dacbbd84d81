"""Callbacks that write files, which one rank must do for all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

WRITERS = (
    keras.callbacks.BackupAndRestore,  # what it restores on rank 0, all others are sent
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


def for_rank(callbacks: Iterable[Any], rank: int) -> list[Any]:
    """Leave out what writes, but on rank 0."""
    return [each for each in callbacks if rank == 0 or not isinstance(each, WRITERS)]
