"""Callbacks of elastic trainings, in which another rank may become rank 0."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol

import keras
import numpy as np

from .. import keras_internals
from ..initial_sync import InitialSync
from ..rank_zero_callbacks import WRITERS, flat

_SIMPLE = (type(None), bool, int, float, str, np.generic, np.ndarray)
_NOT_STATE = {*vars(keras.callbacks.Callback()), "append", "append_header"}


class Training(Protocol):
    """What these callbacks ask."""

    epoch: int
    is_first_rank_zero: bool

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def is_behind(self) -> bool:
        """Whether this rank leaves out what others have done."""


class OnRankZero(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls a callback that writes files, on the rank that is rank 0.

    Args:
        callback: Keras', or derived from one of these.
        verbose: How much a progress bar says.
        fit: Says which rank this is.

    Attributes:
        callback: The argument.
    """

    def __init__(self, callback: Any, verbose: Any, fit: Training) -> None:
        super().__init__()
        self.callback = callback
        self._state: dict[str, Any] = {}  # what the one of rank 0 has told
        self._fit, self._verbose = fit, verbose
        self._has_begun = False  # to be called on this rank, which then is rank 0
        self._missed: tuple[int, Any] | None = None  # the end of an epoch: rank 0 has seen to it

    def set_params(self, params: Any) -> None:
        """Keep them, and pass them on."""
        super().set_params(params)
        self.callback.set_params(params | {"verbose": self._verbose})

    def set_model(self, model: Any) -> None:
        """Keep it, and pass it on."""
        super().set_model(model)
        self.callback.set_model(model)

    def call(self, hook: str, *args: Any, **kwargs: Any) -> None:
        """Call a hook, if this is rank 0, and the others have not called it."""
        if self._fit.rank != 0 or self._fit.is_behind:
            return
        if not self._has_begun:
            self._has_begun = True
            self._take_over()
        getattr(self.callback, hook)(*args, **kwargs)

    def on_train_begin(self, logs: Any = None) -> None:
        """Call it where the job's first rank 0 is; one that follows takes over later."""
        if self._fit.rank == 0 and self._fit.is_first_rank_zero:
            self._has_begun = True
            self.callback.on_train_begin(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Also note it on the other ranks."""
        if self._fit.rank != 0 and not self._fit.is_behind:
            self._missed = epoch, logs
        self.call("on_epoch_end", epoch, logs)

    def repeat_epoch_end(self) -> None:
        """If rank 0 has been lost at the end of an epoch, do what it may not have finished."""
        if self._missed is not None:
            (epoch, logs), self._missed = self._missed, None
            if not _has_logged(self.callback, epoch):
                self.call("on_epoch_end", epoch, logs)

    def state(self) -> dict[str, Any]:
        """What the callback of rank 0 has noted, as far as this rank knows."""
        return _state_of(self.callback) if self._has_begun else self._state

    def take(self, state: dict[str, Any]) -> None:
        """Note what the callback of rank 0 has noted."""
        self._state, self._missed = state, None
        self._has_begun &= self._fit.rank == 0

    def _take_over(self) -> None:
        """Go on where the former rank 0 was: add to its files."""
        if isinstance(self.callback, keras.callbacks.CSVLogger):
            self.callback.append = True
        if not isinstance(self.callback, keras.callbacks.BackupAndRestore):  # would set all back
            self.callback.on_train_begin()
        vars(self.callback).update(self._state)
        if self._fit.epoch >= 0:
            self.callback.on_epoch_begin(self._fit.epoch)


def _hook(name: str) -> Callable[..., None]:
    def call(self: OnRankZero, *args: Any, **kwargs: Any) -> None:
        self.call(name, *args, **kwargs)

    return call


for _name in {name for name in dir(keras.callbacks.Callback) if name.startswith("on_")}:
    if _name not in vars(OnRankZero):
        setattr(OnRankZero, _name, _hook(_name))


def _has_logged(callback: Any, epoch: int) -> bool:
    """Whether a file has the epoch's line already."""
    if not isinstance(callback, keras.callbacks.CSVLogger):
        return False
    path = Path(callback.filename)
    lines = path.read_text().splitlines() if path.exists() else []
    return bool(lines) and lines[-1].split(callback.sep)[0] == str(epoch)


def for_all_ranks(callbacks: Any, verbose: Any, fit: Training) -> list[Any]:
    """Return callbacks, of which those that write are called on rank 0 only; with a progress bar.

    Args:
        callbacks: The program's.
        verbose: How much the progress bar says.
        fit: Says which rank this is.
    """
    given = flat(callbacks)
    if verbose != 0 and not any(isinstance(each, keras.callbacks.ProgbarLogger) for each in given):
        given.append(keras.callbacks.ProgbarLogger())
    return [OnRankZero(each, verbose, fit) if isinstance(each, WRITERS) else each for each in given]


def states_of(callbacks: Sequence[Any]) -> bytes:
    """Return what callbacks have noted, for a rank that joins."""
    return pickle.dumps(
        [each.state() if isinstance(each, OnRankZero) else _state_of(each) for each in callbacks]
    )


def load_states(callbacks: Sequence[Any], states: bytes) -> None:
    """Take over what another rank's callbacks have noted."""
    for each, state in zip(callbacks, pickle.loads(states), strict=False):
        if isinstance(each, OnRankZero):
            each.take(state)
        else:
            _load(each, state)


def _state_of(callback: Any) -> Any:
    if hasattr(callback, "state_dict"):
        return callback.state_dict()
    bases = [kind for kind in type(callback).__mro__ if keras_internals.is_of_keras(kind)]
    if bases[:1] == [keras.callbacks.Callback] or isinstance(callback, InitialSync):
        return {}  # one of the program's own: what it notes may be this rank's
    return {
        name: value
        for name, value in vars(callback).items()
        if name not in _NOT_STATE and _is_simple(value)
    }


def _load(callback: Any, state: Any) -> None:
    if hasattr(callback, "load_state_dict"):
        callback.load_state_dict(state)
    else:
        vars(callback).update(state)


def _is_simple(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_simple, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_simple, value))
    if isinstance(value, FunctionType):  # with which Keras compares a metric's values
        return keras_internals.is_of_keras(value)
    return isinstance(value, _SIMPLE) or keras.ops.is_tensor(value)
