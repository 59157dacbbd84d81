"""The state that the modules of this plug-in share for one strategy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from .backends import load
from .batch_shard import rows_to_read
from .rank_consistency import Progress

if TYPE_CHECKING:
    from sdp_plugins.core import ElasticJob, Group

    from .backends.base import Backend


@dataclass(eq=False)
class TrainingContext:
    """Trains models on the ranks of a group.

    Attributes:
        group: The ranks.
        failure_group: A group of the same ranks, in which they exchange why ``group`` failed.
        backend: The operations of Keras' backend.
        models: The models of the strategy.
        progress: This rank's position in the running ``fit``.
        in_use: Held while a method of a model runs; the method may call others.
        job: The ranks that are there, of an elastic strategy.
        replays: Whether this process leaves out what others have done before it joined.
        join: Joins the job, if this process has yet to; until then `group` is this process alone.
    """

    group: Group
    failure_group: Group
    backend: Backend
    models: WeakSet[Any] = field(default_factory=WeakSet)
    progress: Progress = field(default_factory=Progress)
    in_use: Any = field(default_factory=threading.RLock)
    job: ElasticJob | None = None
    join: Callable[[], ElasticJob] | None = None
    replays: bool = False

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.group.world_size

    def rows_to_read(self, count: int) -> tuple[int, int]:
        """Return the first row and the number of rows of a global batch that this rank reads."""
        return rows_to_read(count, self.rank, self.world_size)

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may be lost, and join."""
        return self.job is not None or self.join is not None

    def adopt(self, group: Group) -> None:
        """Go on with another group; a collective."""
        self.backend.close()
        for former in (self.failure_group, self.group):
            former.close()
        self.group = group
        self.failure_group = failure_group_of(group)
        self.backend = load(group, self.is_elastic)
        for model in list(self.models):  # what is compiled has the former group
            model.train_function = model.test_function = model.predict_function = None

    @contextmanager
    def used_by(self, model: Any) -> Iterator[None]:
        """Let only this thread train; ranks could not distinguish the steps of two threads.

        Raises:
            RuntimeError: Another thread is training.
        """
        if not self.in_use.acquire(blocking=False):
            raise RuntimeError(
                f"model '{model.name}': another thread trains a model under the same strategy. "
                "Hint: make a strategy for each thread, in the same order on all ranks."
            )
        try:
            yield
        finally:
            self.in_use.release()

    def refuse_replay(self, call: str) -> None:
        """Check that the other ranks are where this one is.

        Raises:
            RuntimeError: They have made this call before this process joined.
        """
        if self.replays:
            raise RuntimeError(
                f"a callback calls {call}() in a process that has joined, for a batch that the "
                "others have had. Hint: in elastic trainings that others join, let callbacks use "
                "`logs`, or call it in on_epoch_end."
            )

    def synchronize(self) -> None:
        """Order the host's next collective after those of a step that may be running."""
        for model in list(self.models):
            self.backend.synchronize(model)


def failure_group_of(group: Group) -> Group:
    """Make a group in which the ranks of another exchange why that has failed; a collective."""
    if group.world_size == 1:
        return group
    return group.new_group(range(group.world_size), name="keras failures") or group
