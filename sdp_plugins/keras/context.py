"""What the parts of this plug-in share of one strategy."""

from __future__ import annotations

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
    """

    group: Group
    failure_group: Group
    backend: Backend
    models: WeakSet[Any] = field(default_factory=WeakSet)
    progress: Progress = field(default_factory=Progress)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.group.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.group.world_size

    def synchronize(self) -> None:
        """Have the host's next collective come after those of a step that may be under way."""
        for model in list(self.models):
            self.backend.synchronize(model)
