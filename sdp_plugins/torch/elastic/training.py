"""`Elastic`: a training loop whose ranks may be lost, and joined by others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from sdp_plugins.core import SdpError
from sdp_plugins.core.config import Config
from sdp_plugins.core.elastic_state import JOINS, lost
from sdp_plugins.torch.elastic.default_group import DefaultGroup
from sdp_plugins.torch.elastic.loader import ElasticLoader, Progress
from sdp_plugins.torch.elastic.model import ElasticModel
from sdp_plugins.torch.elastic.state import catch_up, seed_like

Stateful = Any
"""An object with ``state_dict`` and ``load_state_dict``."""


class Step:
    """One step of a training.

    Attributes:
        discarded: Whether a rank was lost in it, so that its result has gone; known at its end.
    """

    discarded = False


class Elastic:
    """Trains a model on all ranks that are there.

    ::

        elastic = sdp_plugins.torch.Elastic(model, optimizer)   # in the place of init_process_group
        loader = elastic.loader(dataset, batch_size=32)
        for epoch in elastic.epochs(10):
            for x, y in loader:
                with elastic.step():
                    loss = loss_function(elastic.model(x), y)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()

    If a rank is lost in a step, the others discard the step, go on without it, and repeat the step
    with its samples divided anew. All of them then have the same weights: a rank that had not yet
    taken a step that another has taken gets that one's state. A process that joins gets the state
    of a rank between two steps.

    Making it is a collective of all ranks of a new job; a process that ``sdp run --elastic`` has
    started in the place of a lost one joins the job here.

    Attributes:
        model: The model in ``DistributedDataParallel``, for the forward passes of steps.
        progress: How far the training has come.
        view: Counts the groups of ranks.

    Args:
        model: Trained in place; not wrapped.
        optimizer: One step of it is taken in each ``step``.
        minimum: How many ranks are needed; fewer wait for others to join.
        timeout_s: Time-out of all waits; None: ``SDP_TIMEOUT_S``, else 300.
        ddp_options: Those of ``DistributedDataParallel``.
        state: Other objects that a rank that joins needs, such as ``scheduler=...``: those with
            ``state_dict`` and ``load_state_dict``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        minimum: int = 1,
        timeout_s: float | None = None,
        ddp_options: dict[str, Any] | None = None,
        **state: Stateful,
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            raise TypeError(
                "Elastic makes DistributedDataParallel itself, anew when ranks change, but got a "
                "model in it. Hint: pass the model."
            )
        self.model = ElasticModel(model, ddp_options or {})
        self._optimizer = optimizer
        self._state: dict[str, Stateful] = {"model": model, "optimizer": optimizer, **state}
        self.progress = Progress(-1 if Config.from_env().join is None else JOINS)
        self.view = 0
        self._counts: list[int] = []
        self._steps_of_optimizer = 0
        optimizer.register_step_post_hook(self._note_step)
        limit_s = Config.from_env().wait_s if timeout_s is None else timeout_s
        self._group = DefaultGroup(limit_s, minimum)
        try:
            self._group.agree(self._agree, self.model.unwrap)
        except BaseException:
            self._group.close()
            raise

    # ---- what a loop uses ----------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank, among those that are there."""
        return self._group.core.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that are there."""
        return self._group.core.world_size

    @property
    def numbers(self) -> list[int]:
        """The ranks' numbers in the job, by rank: a rank keeps its number."""
        return self._group.numbers

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> ElasticLoader:
        """Return batches of a dataset, divided among the ranks that are there.

        Args:
            dataset: Has a length.
            batch_size: Samples of each rank in a step.
            shuffle: Whether each epoch has an order of its own.
            seed: Of these orders; equal on all ranks.
            options: Those of ``DataLoader``.
        """
        return ElasticLoader(self, dataset, batch_size, shuffle, seed, **options)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left, from 0."""
        while self.progress.epoch < count:
            epoch = self.progress.epoch
            yield epoch
            if self.progress.epoch == epoch:
                self.progress = Progress(self.progress.steps, epoch + 1)

    @contextmanager
    def step(self) -> Iterator[Step]:
        """Take a step in the block: forward and backward passes, and one step of the optimizer.

        Raises:
            RuntimeError: The block has left gradients without a step, or a step without
                ``elastic.model``; or the ranks have come to different places.
            RendezvousError: The others have gone on without this rank, or too few are left.
        """
        made, before, committed = Step(), self._steps_of_optimizer, False
        try:
            with self.model.weighted(self._weight()):
                yield made
            self._check_block(before)
            self._commit()
            committed = True
            if self._group.is_asked(self.progress):
                self._go_on(None)  # with those that join
        except Exception as error:
            failure = lost(error)
            if self._steps_of_optimizer > before and not committed:
                self._commit()  # what failed came after it
                committed = True
            made.discarded = not committed
            self._go_on(failure)
        finally:
            self._counts = []

    def close(self) -> None:
        """Leave the job; the others go on."""
        self.model.unwrap()
        self._group.close()

    def begin_batch(self, counts: list[int]) -> None:
        """For loaders: a step begins, of so many samples on each rank."""
        self._counts = counts

    # ---- a step --------------------------------------------------------------------------------

    def _note_step(self, *_: Any) -> None:
        self._steps_of_optimizer += 1

    def _weight(self) -> float:
        """Return the number of this rank's samples over the mean of all ranks'."""
        if not self._counts:  # a step without a loader
            return 1.0
        return self._counts[self.rank] * self.world_size / sum(self._counts)

    def _check_block(self, steps: int) -> None:
        """Check that the block has taken a step, with gradients that the ranks have averaged."""
        if self._steps_of_optimizer > steps:
            if not self.model.was_called:
                raise RuntimeError(
                    "the optimizer has taken a step in a block of elastic.step() in which "
                    "elastic.model was not called, so its gradients are this rank's alone. Hint: "
                    "call elastic.model, not the model itself, in the forward pass."
                )
            return
        left = [p.grad for p in self.model.parameters() if p.grad is not None]
        if left and all(gradient.sum().isfinite() for gradient in left):  # else GradScaler skips it
            raise RuntimeError(
                "a block of elastic.step() has left gradients, and taken no step of the optimizer. "
                "A process that joins now would lack them. Hint: take one step in each block; to "
                "accumulate gradients, call backward() for parts of a batch in one block."
            )

    def _commit(self) -> None:
        steps, epoch, consumed = self.progress
        self.progress = Progress(steps + 1, epoch, consumed + sum(self._counts))
        self._counts = []

    # ---- other ranks ---------------------------------------------------------------------------

    def _go_on(self, failure: SdpError | None) -> None:
        """Go on with the ranks that are there."""
        self.model.unwrap()
        self._optimizer.zero_grad(set_to_none=True)
        self._group.regroup(() if failure is None else failure.global_ranks)
        self._group.agree(self._agree, self.model.unwrap)

    def _agree(self) -> None:
        """Give the state of the rank that has come farthest to those that have not."""
        catch_up(self._group.core, self.progress, self._own_state, self._load)
        if self.progress.steps < 0:
            self.progress = Progress(0)
        self.model.wrap()
        self.view += 1

    def _own_state(self) -> dict[str, Any]:
        kept = {name: thing.state_dict() for name, thing in self._state.items()}
        return {"progress": tuple(self.progress), "seed": torch.initial_seed(), "state": kept}

    def _load(self, state: dict[str, Any]) -> None:
        for name, kept in state["state"].items():
            self._state[name].load_state_dict(kept)
        if self.progress.steps < 0:  # its random numbers are none of another rank's
            seed_like(state["seed"], state["progress"][0], self.numbers[self.rank])
        self.progress = Progress(*state["progress"])
