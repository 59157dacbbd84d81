"""The step that this thread traces or runs.

Keras' losses, metrics, moments and optimizers are called by programs' own train steps, too, and
pass nothing on that would tell the batch. So this is the one thing that is not an argument: a
context variable, which each thread has for itself.
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
    """A step under way.

    Attributes:
        shard: This rank's part of the batch.
        backend: Of the strategy that trains the model.
        updated: Numbers (``id``) of the metrics that the step has updated.
        results: By their numbers, the results of metrics that the step has read, with the metric.
            So far they are of this rank's rows only. They are held here, as a number might be
            another's otherwise.
    """

    shard: BatchShard
    backend: Backend
    updated: set[int] = field(default_factory=set)
    results: dict[int, tuple[Any, Any]] = field(default_factory=dict)


_running: ContextVar[RunningStep | None] = ContextVar("sdp_keras_running_step", default=None)


def running_step() -> RunningStep | None:
    """The step that this thread traces or runs, if any."""
    return _running.get()


def shard_of_step(backend: Backend) -> BatchShard | None:
    """This rank's part of the batch of the running step, if it is one of this backend object's."""
    step = _running.get()
    return step.shard if step is not None and step.backend is backend else None


@contextmanager
def running(step: RunningStep | None) -> Iterator[None]:
    """Inside of the block this thread traces or runs a step; None: no step of a batch."""
    token = _running.set(step)
    try:
        yield
    finally:
        _running.reset(token)
