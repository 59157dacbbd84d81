"""The step that this thread is tracing or running.

Programs' own train steps also call Keras' losses, metrics, moments and optimizers, and pass no
argument that identifies the batch. The step is therefore kept in a context variable, which each
thread has for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backends.base import Backend
    from .batch_shard import BatchShard


@dataclass
class RunningStep:
    """A running step.

    Attributes:
        shard: This rank's part of the batch.
        backend: The backend of the strategy that trains the model.
        updated: The ``id`` of each metric that the step has updated.
        results: The metric results that the step has read, with their metrics, by ``id`` of the
            result. They cover this rank's rows only. The dictionary keeps them alive, so that no
            ``id`` is reused.
    """

    shard: BatchShard
    backend: Backend
    updated: set[int] = field(default_factory=set)
    results: dict[int, tuple[Any, Any]] = field(default_factory=dict)


_running: ContextVar[RunningStep | None] = ContextVar("sdp_keras_running_step", default=None)


def running_step() -> RunningStep | None:
    """Return the step that this thread is tracing or running, if any."""
    return _running.get()


def shard_of_step(backend: Backend) -> BatchShard | None:
    """Return this rank's part of the running step's batch, if this backend object runs the step."""
    step = _running.get()
    return step.shard if step is not None and step.backend is backend else None


@contextmanager
def running(step: RunningStep | None) -> Iterator[None]:
    """Set the step that this thread traces or runs within the context; None: no step of a batch."""
    token = _running.set(step)
    try:
        yield
    finally:
        _running.reset(token)
