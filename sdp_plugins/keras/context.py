"""What the parts of this plug-in share of one strategy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from .progress import Progress

if TYPE_CHECKING:
    from sdp_plugins.core import Group

    from .backends.base import Backend


@dataclass(eq=False)
class TrainingContext:
    """Trains models on the ranks of a group.

    Attributes:
        group: The ranks.
        failure_group: The same ranks; in it they explain to each other why ``group`` has failed.
        backend: What depends on Keras' backend.
        models: Those that it trains.
        progress: Where this rank is in the ``fit`` under way.
        in_use: Held while a method of a model runs, which may call others.
    """

    group: Group
    failure_group: Group
    backend: Backend
    models: WeakSet[Any] = field(default_factory=WeakSet)
    progress: Progress = field(default_factory=Progress)
    in_use: Any = field(default_factory=threading.RLock)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.group.world_size

    @contextmanager
    def used_by(self, model: Any) -> Iterator[None]:
        """Inside of the block this thread trains; ranks could not tell the steps of two apart.

        Raises:
            RuntimeError: Another thread does.
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

    def synchronize(self) -> None:
        """Have the host's next collective come after those of a step that may be under way."""
        for model in list(self.models):
            self.backend.synchronize(model)
