"""Intentional errors that a run has to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any


@dataclass
class Damage:
    """An intentional error of one rank.

    Attributes:
        loss_factor: The factor by which its losses are multiplied.
        weights: Whether it changes a weight without the other ranks.
    """

    loss_factor: float = 1.0
    weights: bool = False

    def callbacks(self) -> list[Any]:
        """Return callbacks for `fit`."""
        if not self.weights:
            return []
        import keras

        class Changes(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                variable = self.model.trainable_variables[0]
                variable.assign(variable * 1.001)

        return [Changes()]


@contextmanager
def nothing(rank: int) -> Iterator[Damage]:
    """Make no error."""
    yield Damage()


@contextmanager
def loss(rank: int) -> Iterator[Damage]:
    """Multiply rank 1's loss, and thus its gradients, by a wrong factor."""
    yield Damage(loss_factor=1.001 if rank == 1 else 1.0)


@contextmanager
def weights(rank: int) -> Iterator[Damage]:
    """Change a weight on rank 1 after each batch."""
    yield Damage(weights=rank == 1)


@contextmanager
def shard(rank: int) -> Iterator[Damage]:
    """Make rank 1 count one row less than it has, if it has at least two."""
    from sdp_plugins.keras.batch_shard import BatchShard

    right = BatchShard.of

    def wrong(batch: Any, count: Any, rank: int, world_size: int) -> BatchShard:
        found = right(batch, count, rank, world_size)
        return replace(found, rows=found.rows - (found.rows > 1))

    if rank == 1:
        BatchShard.of = wrong  # type: ignore[method-assign]
    try:
        yield Damage()
    finally:
        BatchShard.of = right  # type: ignore[method-assign]


WAYS: dict[str, Callable[[int], AbstractContextManager[Damage]]] = {
    "": nothing,
    "loss": loss,
    "weights": weights,
    "shard": shard,
}
