"""The strategy in whose scope a thread creates and compiles models.

A scope belongs to the thread that enters it, as Keras' own scopes do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras

from .context import TrainingContext
from .keras_internals import Trainer, wrap_once
from .model_patch import attach, attached_to, expect
from .model_patch import install as install_methods

log = logging.getLogger("sdp_plugins.keras")
_current: ContextVar[TrainingContext | None] = ContextVar("sdp_keras_scope", default=None)
_open: list[TrainingContext] = []
_WARNED = "_smddp_warned"
_Function = Callable[..., Any]


def install() -> None:
    """Make Keras' models use the active scope; outside a scope they are unchanged."""
    install_methods()
    wrap_once(Trainer, "__init__", _expecting)
    wrap_once(Trainer, "compile", _attaching)
    owner = next(kind for kind in keras.Model.__mro__ if "make_train_function" in vars(kind))
    wrap_once(owner, "make_train_function", _warning)


def opened(context: TrainingContext) -> None:
    """Start warning of models that are trained without a strategy."""
    _open.append(context)


def closed(context: TrainingContext) -> None:
    """Stop warning once no strategy is open."""
    if context in _open:
        _open.remove(context)


@contextmanager
def entered(context: TrainingContext) -> Iterator[None]:
    """Make the strategy train the models that this thread creates and compiles in the context.

    Raises:
        RuntimeError: Another strategy's scope is active.
    """
    if _current.get() not in (None, context):
        raise RuntimeError(
            "scope() of one strategy inside of the scope of another. Hint: make one SMDDPStrategy "
            "and use it for all models."
        )
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def _expecting(make: _Function) -> _Function:
    def made(model: Any, *args: Any, **kwargs: Any) -> None:
        make(model, *args, **kwargs)
        if _current.get() is not None:
            expect(model)

    return made


def _attaching(compile_model: _Function) -> _Function:
    def compiled(model: Any, *args: Any, **kwargs: Any) -> None:
        compile_model(model, *args, **kwargs)
        if (context := _current.get()) is not None:
            attach(model, context)

    return compiled


def _warning(make: _Function) -> _Function:
    """Warn before training: Keras' methods request the train function before they train."""

    def made(model: Any, *args: Any, **kwargs: Any) -> Any:
        _warn_if_alone(model)
        return make(model, *args, **kwargs)

    return made


def _warn_if_alone(model: Any) -> None:
    is_open = any(not context.group.closed for context in tuple(_open))
    if not is_open or attached_to(model) is not None or _WARNED in vars(model):
        return
    object.__setattr__(model, _WARNED, True)
    log.warning(
        "model '%s' was compiled outside of strategy.scope(): fit() trains it on each rank alone. "
        "Hint: call compile() inside of `with strategy.scope():`, unless you want this.",
        model.name,
    )
