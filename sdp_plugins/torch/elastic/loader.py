"""Divides what is left of an epoch among the ranks that are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler


class Progress(NamedTuple):
    """How far a training has come.

    Attributes:
        steps: Number of steps; -1 before the ranks have agreed on their first weights.
        epoch: The epoch, from 0.
        consumed: Number of samples of this epoch on which it has trained.
    """

    steps: int = -1
    epoch: int = 0
    consumed: int = 0


class Position(Protocol):
    """What a loader asks about the training."""

    progress: Progress

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def view(self) -> int:
        """Changes when the ranks do."""

    def begin_batch(self, counts: list[int]) -> None:
        """A step begins, of so many samples on each rank."""


def division(left: int, batch_size: int, world_size: int) -> list[int]:
    """How many samples each rank takes in the next step; the last ones of an epoch evenly."""
    share, more = divmod(min(left, batch_size * world_size), world_size)
    return [share + (rank < more) for rank in range(world_size)]


def batches(
    order: Sequence[int], at: int, batch_size: int, rank: int, world_size: int
) -> Iterator[list[int]]:
    """Yield a rank's samples in each step that is left; one that does not count if it has none.

    Args:
        order: All samples, in the order in which steps use them.
        at: Number of samples that have been used.
        batch_size: Samples of each rank in a step.
        rank: The rank.
        world_size: Number of ranks.
    """
    while at < len(order):
        counts = division(len(order) - at, batch_size, world_size)
        first = at + sum(counts[:rank])
        yield list(order[first : first + counts[rank]]) or [order[at]]
        at += sum(counts)


class ElasticLoader:
    """Batches of a dataset, of which each sample goes to one rank in each epoch.

    An iteration yields this rank's batches of the present epoch, from where the training has come.
    When ranks are lost or join, what is left is divided anew. A step that is discarded is yielded
    again, in the new division. Near the end of an epoch batches are smaller; if there is nothing
    left for a rank, it gets one sample that does not count.

    Args:
        position: Where the training is.
        dataset: Has a length.
        batch_size: Samples of each rank in a step.
        shuffle: Whether each epoch has an order of its own.
        seed: Of these orders.
        options: Those of ``DataLoader``.
    """

    def __init__(
        self,
        position: Position,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool,
        seed: int,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise TypeError(
                "an elastic loader needs a dataset with a length and indices, to divide it among "
                "the ranks that are there, but got an IterableDataset."
            )
        self._position = position
        self._sampler = _Sampler(
            position, len(cast(Sized, dataset)), batch_size, seed if shuffle else None
        )
        self._loader = DataLoader(dataset, batch_sampler=self._sampler, **options)

    def __iter__(self) -> Iterator[Any]:
        position, sampler = self._position, self._sampler
        epoch = position.progress.epoch
        while position.progress[1:] < (epoch, sampler.size):
            view = position.view
            for batch in self._loader:
                counts = sampler.next_counts(position.progress.consumed)
                before = position.progress
                position.begin_batch(counts)
                yield batch
                if position.view != view:
                    break
                if position.progress == before:
                    raise RuntimeError(
                        "a batch of an elastic loader was not used in a step. Hint: write `with "
                        "elastic.step():` around the body of the loop."
                    )

    def __len__(self) -> int:
        """Number of steps that are left of the epoch, if the ranks stay."""
        return len(self._sampler)


class _Sampler(Sampler[list[int]]):
    def __init__(self, position: Position, size: int, batch_size: int, seed: int | None) -> None:
        self._position = position
        self.size, self._batch_size, self._seed = size, batch_size, seed

    def next_counts(self, consumed: int) -> list[int]:
        return division(self.size - consumed, self._batch_size, self._position.world_size)

    def _order(self) -> list[int]:
        if self._seed is None:
            return list(range(self.size))
        generator = torch.Generator()
        generator.manual_seed(self._seed + self._position.progress.epoch)
        order: list[int] = torch.randperm(self.size, generator=generator).tolist()
        return order

    def __iter__(self) -> Iterator[list[int]]:
        position = self._position
        at, rank, world = position.progress.consumed, position.rank, position.world_size
        return batches(self._order(), at, self._batch_size, rank, world)

    def __len__(self) -> int:
        left = self.size - self._position.progress.consumed
        return -(-left // (self._batch_size * self._position.world_size))
