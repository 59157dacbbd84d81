"""Hooks for sessions of TensorFlow 1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .functions import broadcast_global_variables


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Copies one rank's variables to all ranks when a session begins."""

    def __init__(self, root_rank: int = 0) -> None:
        """Set the rank to copy from."""
        super().__init__()
        self._root_rank = root_rank
        self._operation: Any = None

    def begin(self) -> None:
        """Add the operation before the graph is finalized."""
        self._operation = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Copy the variables."""
        session.run(self._operation)
