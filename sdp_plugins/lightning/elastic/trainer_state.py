"""What a rank tells another that has not come so far in the training, or has just joined."""

from __future__ import annotations

import pickle
from typing import Any

import torch


class LoopProgress:
    """The counters of a Trainer's loops, which say where in the training it is.

    Args:
        fit_loop: Of the Trainer.
    """

    def __init__(self, fit_loop: Any) -> None:
        self._epoch_loop = fit_loop.epoch_loop
        loops = (
            fit_loop,
            fit_loop.epoch_loop,
            fit_loop.epoch_loop.automatic_optimization,
            fit_loop.epoch_loop.manual_optimization,
            fit_loop.epoch_loop.val_loop,
        )
        self._places = [
            (loop, name)
            for loop in loops
            for name, value in vars(loop).items()
            if name.endswith("_progress") and hasattr(value, "load_state_dict")
        ]
        self._places.append((self._epoch_loop, "_batches_that_stepped"))

    def save(self) -> bytes:
        """Return the counters as they are now."""
        return pickle.dumps([getattr(loop, name) for loop, name in self._places])

    def restore(self, saved: bytes) -> None:
        """Set the counters to what they were."""
        for (loop, name), value in zip(self._places, pickle.loads(saved), strict=True):
            setattr(loop, name, value)

    def finish_batch(self) -> None:
        """Count the batch under way as one that is done: its step has been taken."""
        progress = self._epoch_loop.batch_progress
        for counts in (progress.current, progress.total):
            counts.processed = counts.completed = counts.ready


def trainer_state(trainer: Any) -> dict[str, Any]:
    """What a checkpoint has, and what Lightning does not keep in one."""
    return {
        "checkpoint": trainer._checkpoint_connector.dump_checkpoint(weights_only=False),
        "folders": [callback.dirpath for callback in trainer.checkpoint_callbacks],
        "should_stop": trainer.should_stop,
        "seed": torch.initial_seed(),
    }


def load_trainer_state(trainer: Any, state: dict[str, Any]) -> None:
    """Take over a state; the counters of the loops are set by ``LoopProgress``."""
    for callback, folder in zip(trainer.checkpoint_callbacks, state["folders"], strict=True):
        callback.dirpath = folder  # else it takes the others' checkpoints for those of another run
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = state["checkpoint"]
    connector.restore_datamodule()
    connector.restore_model()
    connector.restore_callbacks()
    connector.restore_precision_plugin_state()
    connector.restore_optimizers_and_schedulers()
    connector._loaded_checkpoint = {}
    trainer.should_stop = state["should_stop"]
