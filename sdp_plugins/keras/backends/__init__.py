"""The parts that depend on Keras' backend: one file for each backend."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import keras

from .base import Backend

if TYPE_CHECKING:
    from sdp_plugins.core import Group

_CLASSES = {"tensorflow": "TensorFlowBackend", "torch": "TorchBackend", "jax": "JaxBackend"}


def load(group: Group, is_atomic: bool = False) -> Backend:
    """Return the operations of the backend that Keras runs on.

    Args:
        group: The ranks.
        is_atomic: Whether a step that fails has updated all weights or none.

    Raises:
        ValueError: The plug-in does not support this backend.
    """
    name = keras.backend.backend()
    if name not in _CLASSES:
        raise ValueError(
            f"SMDDPStrategy: Keras runs on the backend '{name}'. Hint: set KERAS_BACKEND to "
            "tensorflow, torch or jax."
        )
    backend: Backend = getattr(import_module(f".{name}", __name__), _CLASSES[name])(group)
    backend.is_atomic = is_atomic
    return backend
