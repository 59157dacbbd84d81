"""Divides what is left of an epoch among the ranks that are there."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from sdp_plugins.torch.elastic.loader import batches, division


class Division:
    """Which samples of an epoch this rank takes.

    In each step the ranks take the next samples of one order. Samples that a step has used count
    once its optimizer has; so those of a discarded step are taken again.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._epoch = 0
        self._order: list[int] = []  # of the epoch; read from the sampler if empty
        self._used = 0  # samples of the epoch, in steps that have been taken
        self._batches = 0  # of this rank in these steps
        self._pending = (0, 0)  # samples and batches of the step under way
        self._source: Sampler[int] | None = None
        self._batch_size, self._drop_last = 1, False

    def divide(self, loader: DataLoader[Any]) -> None:
        """Give a loader this rank's part of what is left.

        Raises:
            TypeError: The loader has no batches of indices of a sampler that Lightning has set.
        """
        batches = getattr(loader, "batch_sampler", None)
        source = getattr(batches, "sampler", None)
        if isinstance(source, _Sampler):
            return
        if type(batches) is not BatchSampler or not isinstance(source, DistributedSampler):
            raise TypeError(
                "smddp_elastic divides each epoch anew when ranks are lost or join, so it needs a "
                "DataLoader with a dataset that has a length and indices, a batch_size, and no "
                "batch_sampler of its own; and Trainer(use_distributed_sampler=True)."
            )
        self._source = source
        self._batch_size, self._drop_last = batches.batch_size, batches.drop_last
        batches.sampler = _Sampler(self)

    # ---- steps ---------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it has begun."""
        if epoch != self._epoch:
            self._epoch, self._order, self._used, self._batches = epoch, [], 0, 0
            self._pending = (0, 0)

    def begin_batch(self) -> float:
        """Begin a batch.

        Returns:
            By what to multiply this rank's loss, so that the mean over the ranks is one over
            samples: 1.0 but for the last batches of an epoch.
        """
        samples, batches = self._pending
        counts = self._counts(self._used + samples)
        self._pending = samples + sum(counts), batches + 1
        return counts[self.rank] * self.world_size / max(1, sum(counts))

    @property
    def in_step(self) -> bool:
        """Whether batches have been used for a step that is not yet taken."""
        return self._pending[1] > 0

    def commit(self) -> None:
        """The step is taken."""
        samples, batches = self._pending
        self._used, self._batches = self._used + samples, self._batches + batches
        self._pending = (0, 0)

    def discard(self) -> None:
        """The step is discarded; its samples are left."""
        self._pending = (0, 0)

    # ---- samples -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """Return this rank's samples, batch by batch."""
        mine = batches(
            self._in_order()[: self._end], self._used, self._batch_size, self.rank, self.world_size
        )
        return chain.from_iterable(mine)

    def __len__(self) -> int:
        """Number of this rank's samples in the whole epoch, if all batches before were full."""
        steps, rest = divmod(self._end - self._used, self._batch_size * self.world_size)
        last = max(1, self._counts(self._end - rest)[self.rank]) if rest else 0
        return (self._batches + steps) * self._batch_size + last

    def _counts(self, at: int) -> list[int]:
        return division(self._end - at, self._batch_size, self.world_size)

    @property
    def _end(self) -> int:
        """How many samples the ranks use; with drop_last, they end with a full step."""
        size = len(self._in_order())
        step = self._batch_size * self.world_size
        return size - (size - self._used) % step if self._drop_last else size

    def _in_order(self) -> list[int]:
        if not self._order:
            source: Any = self._source
            source.num_replicas, source.rank = 1, 0
            source.num_samples = source.total_size = len(source.dataset)
            source.set_epoch(self._epoch)
            self._order = list(source)
        return self._order

    # ---- other ranks ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What another rank needs to go on from here."""
        order = torch.tensor(self._in_order())
        return {"epoch": self._epoch, "order": order, "used": self._used, "batches": self._batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where another rank is."""
        self._epoch, self._order = state["epoch"], state["order"].tolist()
        self._used, self._batches, self._pending = state["used"], state["batches"], (0, 0)


class _Sampler(Sampler[int]):
    """A rank's samples, for a BatchSampler; Lightning tells it the epoch."""

    def __init__(self, division: Division) -> None:
        self._division = division

    def set_epoch(self, epoch: int) -> None:
        self._division.begin_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(self._division)

    def __len__(self) -> int:
        return len(self._division)
