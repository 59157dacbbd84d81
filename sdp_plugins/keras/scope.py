"""The strategy whose scope the program is in."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from . import keras_internals

if TYPE_CHECKING:
    from .strategy import SMDDPStrategy

log = logging.getLogger("sdp_plugins.keras")
_entered: list[SMDDPStrategy] = []
_open: list[SMDDPStrategy] = []  # those of several ranks
_warning = ExitStack()


def opened(strategy: SMDDPStrategy) -> None:
    """From now on, warn of models that are compiled outside of all scopes."""
    if not _open:
        _warning.enter_context(_warning_outside())
    _open.append(strategy)


def closed(strategy: SMDDPStrategy) -> None:
    """No more of it, unless others have a group that is open."""
    if strategy in _open and all(each.group.closed for each in _open):
        _open.clear()
        _warning.close()


@contextmanager
def _warning_outside() -> Iterator[None]:
    from .model_patch import is_attached

    compile_model = keras_internals.Trainer.compile

    def compiled(model: Any, *args: Any, **kwargs: Any) -> None:
        compile_model(model, *args, **kwargs)
        if not _entered and not is_attached(model):
            log.warning(
                "model '%s' is compiled outside of strategy.scope(): fit() would train it on each "
                "rank alone. Hint: call compile() inside of `with strategy.scope():`, unless you "
                "want this.",
                model.name,
            )

    with keras_internals.replaced(keras_internals.Trainer, "compile", compiled):
        yield


@contextmanager
def entered(strategy: SMDDPStrategy) -> Iterator[SMDDPStrategy]:
    """Have models that are made and compiled inside of the block trained by a strategy.

    Raises:
        RuntimeError: The block is inside of another strategy's scope.
    """
    if _entered and _entered[-1] is not strategy:
        raise RuntimeError(
            "scope() of one strategy inside of the scope of another. Hint: make one SMDDPStrategy "
            "and use it for all models."
        )
    _entered.append(strategy)
    try:
        if len(_entered) == 1:
            with _watching(strategy):
                yield strategy
        else:
            yield strategy
    finally:
        _entered.pop()


@contextmanager
def _watching(strategy: SMDDPStrategy) -> Iterator[None]:
    """Notice models that are made, and those that are compiled."""
    from .model_patch import attach, expect

    make, compile_model = keras_internals.Trainer.__init__, keras_internals.Trainer.compile

    def made(model: Any, *args: Any, **kwargs: Any) -> None:
        make(model, *args, **kwargs)
        expect(model)

    def compiled(model: Any, *args: Any, **kwargs: Any) -> None:
        compile_model(model, *args, **kwargs)
        attach(model, strategy)

    with (
        keras_internals.replaced(keras_internals.Trainer, "__init__", made),
        keras_internals.replaced(keras_internals.Trainer, "compile", compiled),
    ):
        yield
