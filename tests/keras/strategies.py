"""Models under a strategy of their own, for tests of the strategy itself."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import keras
from keras import ops

from sdp_plugins.keras import SMDDPStrategy
from tests import log_lines
from tests.keras.first_ranks import on_ranks
from tests.keras.models import crossentropy, dense


@contextmanager
def strategy() -> Iterator[SMDDPStrategy]:
    keras.utils.clear_session()
    keras.utils.set_random_seed(5 + int(os.environ.get("RANK", 0)))
    made = SMDDPStrategy()
    try:
        yield made
    finally:
        made.close()


def compiled(made: SMDDPStrategy, *more: Any, **options: Any) -> Any:
    with made.scope():
        model = dense(*more)
        options = {"optimizer": "sgd", "loss": crossentropy(), "metrics": ["accuracy"]} | options
        model.compile(**options)
    return model


def values(model: Any) -> list[Any]:
    return [ops.convert_to_numpy(v) for v in [*model.variables, *model.optimizer.variables]]


def logged() -> AbstractContextManager[list[str]]:
    return log_lines.logged("sdp_plugins.keras", logging.INFO)


def error_of(function: Callable[..., Any], *args: Any) -> str:
    """The error that a function ends with; its text."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def fails(
    *told: str, on_all_ranks: bool = False, backends: Sequence[str] = ("torch",)
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Have a test, `test(rank, strategy)`, fail on two ranks: rank 0, or each, is told why."""

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @wraps(function)
        def fail(rank: int, world: int) -> None:
            with strategy() as made:
                text = error_of(function, rank, made)
            for part in told if rank == 0 or on_all_ranks else ():
                assert part in text, text

        return on_ranks(2, backends)(fail)

    return decorate
