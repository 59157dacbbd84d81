"""Repeats the part of ``Trainer.fit`` in which a rank was lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sdp_plugins.core.elastic_state import JOINS, lost
from sdp_plugins.lightning.elastic.division import Division
from sdp_plugins.lightning.elastic.trainer_state import (
    Saved,
    TrainerProgress,
    load_trainer_state,
    trainer_state,
)
from sdp_plugins.torch.elastic.default_group import DefaultGroup
from sdp_plugins.torch.elastic.state import catch_up, seed_like

EPOCH_START, EPOCH_END, RUN_END = "epoch start", "epoch end", "run end"
BATCH, BATCH_END = "batch", "batch end"
WITHIN_AN_EPOCH = (BATCH, BATCH_END)


class ElasticFit:
    """Follows the sections of ``Trainer.fit``, and goes back to the start of one.

    A section is a call of one of the loops' methods: the start of an epoch, a batch, what follows
    a batch (validation), the end of an epoch, the end of the training. When a rank is lost, the
    others make a new group. The ranks that have not come as far as another take over its state, and
    leave sections until they are where that one is. All then repeat the section that was under way:
    their loops' counters are set to what they were at its start. With gradients that are
    accumulated, sections are repeated from the first batch of the optimizer's step.

    A process that joins has called the first sections alone. It joins before its first batch, when
    the others begin one.

    Attributes:
        division: Which samples this rank takes.
        steps: Steps of optimizers that this rank has taken.

    Args:
        trainer: Whose ``fit`` begins.
        strategy: Its strategy.
        join: Joins the job, if this process has not been in it before; else None.
    """

    def __init__(self, trainer: Any, strategy: Any, join: Callable[[], DefaultGroup] | None):
        self._trainer, self._strategy, self._join = trainer, strategy, join
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._fit_loop, self._epoch_loop = fit, epoch
        self._progress = TrainerProgress(trainer)
        self.division = Division(strategy.global_rank, strategy.world_size)
        self.steps = 0
        self._number, self._begun_at = 0, EPOCH_START
        self._saved: Saved = (b"", [])
        self._validates: bool | None = None  # at the end of this batch
        self._steps_then = 0
        self._current = EPOCH_START
        self._goal: str | None = None  # the section to which this rank goes on
        self._has_changed = False  # the ranks, in this epoch
        self._has_joined = False  # before this batch: then the others know who asks
        self._replaced: list[tuple[Any, str]] = []
        self._should_validate = epoch._should_check_val_fx
        self._replace(epoch, "_should_check_val_fx", self._is_validation_due)
        for section, loop, name in (
            (EPOCH_START, fit, "on_advance_start"),
            (BATCH, epoch, "advance"),
            (BATCH_END, epoch, "on_advance_end"),
            (EPOCH_END, fit, "on_advance_end"),
            (RUN_END, fit, "on_run_end"),
        ):
            self._replace(loop, name, partial(self._run, section, getattr(loop, name)))

    def _replace(self, loop: Any, name: str, method: Callable[..., Any]) -> None:
        setattr(loop, name, method)
        self._replaced.append((loop, name))

    def close(self) -> None:
        """Leave the loops as they were."""
        for loop, name in self._replaced:
            vars(loop).pop(name, None)
        self._replaced = []

    @property
    def is_training(self) -> bool:
        """Whether loaders that are set up now are those for training."""
        return bool(self._trainer.training)

    # ---- sections ------------------------------------------------------------------------------

    def _run(self, section: str, call: Callable[..., None], *args: Any) -> None:
        """Run a section, as often as ranks are lost in it."""
        if self._join is not None and section != BATCH:
            return call(*args)
        if self._goal not in (None, section):
            return self._leave(section)
        self._current, again = section, True
        if self._join is not None:
            again = self._begin_with_the_others()
        else:
            self._begin(section)
        while again:
            try:
                if section == BATCH:
                    return self._run_batch(call)
                if section == EPOCH_START:
                    self._begin_epoch()
                return call(*self._arguments(args))
            except StopIteration:
                raise
            except Exception as error:
                again = self._recover(error)
        return self._leave(section)

    def _arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The fetcher of the present loader, not of the one with which the epoch began."""
        return (self._fit_loop._data_fetcher,) if args else ()

    def _leave(self, section: str) -> None:
        """Leave a section that another rank has done; leave the epoch if that one has."""
        if section in WITHIN_AN_EPOCH and self._goal not in WITHIN_AN_EPOCH:
            raise StopIteration

    def _begin(self, section: str) -> None:
        self._has_joined = False
        if not self.division.in_step:
            if self._goal is None:
                self._number += 1
            self._save(section)
        self._goal = None

    def _save(self, section: str) -> None:
        self._begun_at, self._saved = section, self._progress.save()
        self._steps_then = self.steps
        self._validates = None
        if section == BATCH_END:  # before other ranks have other numbers of batches
            self._validates = self._should_validate(self._fit_loop._data_fetcher)

    def _is_validation_due(self, fetcher: Any) -> bool:
        """Whether to validate, in the place of the loop's method."""
        return self._should_validate(fetcher) if self._validates is None else self._validates

    def _begin_epoch(self) -> None:
        """Count the batches of this epoch anew if ranks have changed in the one before."""
        self.division.begin_epoch(self._fit_loop.epoch_progress.current.processed)
        if self._has_changed:
            self._has_changed = False
            self._drop_loader(self._fit_loop)

    def _run_batch(self, call: Callable[..., None]) -> None:
        if not (self.division.in_step or self._has_joined) and self._strategy.ranks.is_asked():
            self._let_join()
        self._strategy.loss_factor = self.division.begin_batch()
        try:
            call(self._fit_loop._data_fetcher)
        except StopIteration:
            self.division.discard()
            raise
        if self.steps > self._steps_then:
            self.division.commit()

    # ---- other ranks ---------------------------------------------------------------------------

    def _let_join(self) -> None:
        """Let those in that ask to join."""
        self._undo()
        self._strategy.ranks.regroup(())
        self._go_on()

    def _recover(self, error: Exception) -> bool:
        """Go on with the ranks that are left.

        Returns:
            Whether to repeat the section.
        """
        failure = lost(error)
        automatic = self._trainer.lightning_module.automatic_optimization
        if automatic and self.steps > self._steps_then and self._begun_at == BATCH:
            self.division.commit()  # what failed came after the step
            self._progress.finish_batch()
            self._number += 1
            self._save(BATCH_END)
        else:
            self.division.discard()
            self._progress.restore(self._saved)
            self._steps_then = self.steps  # in manual optimization, some may have been taken
        self._undo()
        self._strategy.ranks.regroup(failure.global_ranks, admits=False)
        return self._go_on()

    def _begin_with_the_others(self) -> bool:
        assert self._join is not None
        self._number = self._steps_then = self.steps = JOINS
        self._strategy.ranks = self._join()
        self._join = None
        return self._go_on(joins=True)

    def _go_on(self, joins: bool = False) -> bool:
        """Bring all ranks to the same section; a collective.

        Args:
            joins: Whether this process joins them.

        Returns:
            Whether this rank is in it already.
        """
        is_behind = False

        def agree() -> None:
            nonlocal is_behind
            self._strategy.set_world_ranks()
            core = self._strategy.ranks.core
            self.division.rank, self.division.world_size = core.rank, core.world_size
            progress = self._number, self.steps
            is_behind |= catch_up(core, progress, self._state, self._load)
            self._strategy.configure_ddp()
            self._reload()

        self._strategy.ranks.agree(agree, self._undo, admits=False)
        self._has_joined = joins
        again = self._current == self._begun_at and (joins or not is_behind)
        self._goal = None if again else self._begun_at
        return again

    def _undo(self) -> None:
        self._strategy.end_ddp()
        for optimizer in self._trainer.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _reload(self) -> None:
        """Make the loaders for the ranks that are there; a collective."""
        trainer, fit, validation = self._trainer, self._fit_loop, self._epoch_loop.val_loop
        if trainer.validating:
            validation._module_mode.restore(trainer.lightning_module)
        trainer.training = True
        trainer.lightning_module._current_fx_name = None  # of the hook that has failed
        validation._results.reset()
        self._drop_loader(fit)
        self._drop_loader(validation)
        self._has_changed = True
        fit.setup_data()
        fit._data_fetcher.fetched += self._epoch_loop.batch_progress.current.ready

    def _drop_loader(self, loop: Any) -> None:
        """Have the loop make its loader when it needs one."""
        if loop._data_fetcher is not None:
            loop._data_fetcher.teardown()
        loop._data_fetcher = loop._combined_loader = None

    # ---- the state -----------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {
            **trainer_state(self._trainer),
            "division": self.division.state_dict(),
            "place": (self._number, self.steps, self._begun_at, self._saved, self._validates),
        }

    def _load(self, state: dict[str, Any]) -> None:
        load_trainer_state(self._trainer, state)
        self.division.load_state_dict(state["division"])
        joins = self._number < 0
        place = state["place"]
        self._number, self.steps, self._begun_at, self._saved, self._validates = place
        self._steps_then = self.steps
        self._progress.restore(self._saved)
        if joins:  # its random numbers are none of another rank's
            own = self._strategy.ranks.numbers[self.division.rank]
            seed_like(state["seed"], self._number, own)
