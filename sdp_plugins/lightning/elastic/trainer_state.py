"""What a rank tells another that has not come so far in the training, or has just joined."""

from __future__ import annotations

import pickle
from typing import Any

import torch

_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_SIMPLE = (type(None), bool, int, float, str, torch.Tensor)
_OF_THIS_PROCESS = {"_last_time_checked"}


Saved = tuple[bytes, list[dict[str, Any]]]


class TrainerProgress:
    """Where in the training a Trainer is.

    That is what its loops count, and what its callbacks note that save checkpoints or stop the
    training.

    Args:
        trainer: The Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        fit_loop, logs = trainer.fit_loop, trainer._logger_connector
        self._epoch_loop = fit_loop.epoch_loop
        self._callbacks = (*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks)
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
        self._places += [(logs, "_first_loop_iter"), (logs, "_current_fx")]

    def save(self) -> Saved:
        """Return a copy of all as it is now."""
        counts = pickle.dumps([getattr(owner, name) for owner, name in self._places])
        return counts, [_copied(_simple_values(callback)) for callback in self._callbacks]

    def restore(self, saved: Saved) -> None:
        """Set all to what it was."""
        counts, notes = saved
        for (owner, name), value in zip(self._places, pickle.loads(counts), strict=True):
            setattr(owner, name, value)
        for callback, values in zip(self._callbacks, notes, strict=True):
            vars(callback).update(_copied(values))

    def finish_batch(self) -> None:
        """Count the batch under way as one that is done: its step has been taken."""
        progress = self._epoch_loop.batch_progress
        for counts in (progress.current, progress.total):
            counts.processed = counts.completed = counts.ready


def _simple_values(callback: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(callback).items()
        if name not in _OF_THIS_PROCESS and _is_simple(value)
    }


def _is_simple(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_simple, value.values()))
    return isinstance(value, _SIMPLE)


def _copied(value: Any) -> Any:
    """Copy a simple value; to pickle tensors would take longer, and this is done in each step."""
    if isinstance(value, dict):
        return {name: _copied(part) for name, part in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def trainer_state(trainer: Any) -> dict[str, Any]:
    """What a checkpoint has, and what Lightning does not keep in one."""
    return {
        "checkpoint": trainer._checkpoint_connector.dump_checkpoint(weights_only=False),
        "folders": [callback.dirpath for callback in trainer.checkpoint_callbacks],
        "metrics": [getattr(trainer._logger_connector, name) for name in _METRICS],
        "should_stop": trainer.should_stop,
        "seed": torch.initial_seed(),
    }


def load_trainer_state(trainer: Any, state: dict[str, Any]) -> None:
    """Take over a state; the rest is set by ``TrainerProgress``."""
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
    for name, metrics in zip(_METRICS, state["metrics"], strict=True):
        setattr(trainer._logger_connector, name, metrics)
    trainer.should_stop = state["should_stop"]
