"""In a rank: the commands of `slow`."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from benchmarks import bert
from benchmarks.libraries.base import Place
from benchmarks.slow.language import RATE, LanguageWorkload
from benchmarks.slow.variants import VARIANTS, Training
from benchmarks.torch_groups import join

BERT: dict[str, Any] = {"rows": 1, "tokens": 48, "model": {"words": bert.VOCABULARY}}
"""BERT-Medium. The ranks share this machine's cores, so that a step is as long as on cores of
their own with batches of some hundred tokens."""


class SlowTask:
    """Trains one variant at a time.

    Args:
        place: This rank's position.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        join(place)
        self._training: Training | None = None
        self._workload: Any = None
        self._step = 0
        self._schedule: LRScheduler | None = None

    def build(self, variant: str, seed: int | None, steps: int) -> int:
        """Begin a training.

        Args:
            variant: One of `VARIANTS`.
            seed: Of the language model; None: BERT with SGD.
            steps: After which the language model's learning rate is at its lowest.

        Returns:
            The number of parameters.
        """
        self.release()
        self._step, self._schedule = 0, None
        if seed is None:
            self._workload = bert.Workload(BERT)
            model = self._workload.build()
            self._training = VARIANTS[variant](model, lambda p: torch.optim.SGD(p, lr=1e-4))
        else:
            self._workload = LanguageWorkload(seed)
            model = self._workload.build()
            self._training = VARIANTS[variant](model, lambda p: torch.optim.AdamW(p, lr=RATE))
            self._schedule = self._workload.schedule(self._training.optimizer, steps)
        return sum(parameter.numel() for parameter in model.parameters())

    def train(self, steps: int) -> float:
        """Return the seconds of these steps, from a barrier on."""
        training, workload = self._training, self._workload
        assert training is not None
        batches = [workload.batch(self._step + i, self.place.rank) for i in range(steps)]
        dist.barrier()
        start = time.perf_counter()
        for batch in batches:
            training.model(*batch).backward()
            training.optimizer.step()
            training.after()
            if self._schedule is not None:
                self._schedule.step()
            training.optimizer.zero_grad()
        self._step += steps
        return time.perf_counter() - start

    def finish(self) -> None:
        """Make the ranks' models equal."""
        assert self._training is not None
        self._training.finish()

    def loss(self) -> float:
        """Return the loss of this rank's model on the text that was held out."""
        assert self._training is not None
        model = getattr(self._training.model, "module", self._training.model)
        with torch.no_grad():
            return float(model(*self._workload.held_out()))

    def release(self) -> None:
        """Forget the training."""
        if self._training is not None:
            self._training.close()
        self._training = None

    def close(self) -> None:
        """Leave all groups."""
        self.release()
        dist.destroy_process_group()
