"""The parts that depend on Keras' backend: one file for each backend, with the same functions."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import keras

from .base import Backend

if TYPE_CHECKING:
    from sdp_plugins.core import Group


def load(group: Group) -> Backend:
    """Return the functions of the backend that Keras runs on.

    Raises:
        ValueError: The plug-in does not support this backend.
    """
    name = keras.backend.backend()
    if name not in ("tensorflow", "torch", "jax"):
        raise ValueError(
            f"SMDDPStrategy: Keras runs on the backend '{name}'. Hint: set KERAS_BACKEND to "
            "tensorflow, torch or jax."
        )
    backend: Backend = import_module(f".{name}", __name__).make(group)
    return backend
