"""Repeats the part of Keras' `fit` in which a rank was lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import keras

from sdp_plugins.core import SdpError
from sdp_plugins.core.elastic_state import JOINS, catch_up, lost, receive, send

from ..data import BatchShards, compare_batches
from ..initial_sync import seed_states
from ..variables import diversify, optimizers_of
from .callbacks import OnRankZero, for_all_ranks, load_states, states_of
from .data import ElasticData
from .model_state import ModelState, assign

if TYPE_CHECKING:
    from ..context import TrainingContext

_BEGIN, _TRAIN, _TEST, _EPOCH_END = -1, 0, 1, 2
_Place = tuple[int, int, int]
"""The epoch; which kind of part of it; the number of the batch."""
_JOINS: _Place = (JOINS, 0, 0)
_END: _Place = (2**31, 0, 0)


class ElasticFit:
    """Follows the parts of a `fit`, and repeats one.

    A part is a training step, a step of a validation, or what ranks do together at the start or the
    end of an epoch. All ranks have the same parts in the same order. When a rank is lost, the
    others make a new group. Those that have not come as far as another take over its state, and
    leave out parts until they are where that one is. All then repeat the part that was under way.

    A process that joins does so before Keras' own `fit`, and leaves out parts in the same way. It
    comes in when the others begin a training step.

    Args:
        model: Is trained.
        context: Of the strategy.
        data: The training's.
        options: Other arguments of `fit`.

    Attributes:
        context: The argument.
        epoch: The epoch under way; -1 before the first.
        is_first_rank_zero: Whether this is the rank 0 with which the job began.
    """

    def __init__(
        self, model: Any, context: TrainingContext, data: Any, options: dict[str, Any]
    ) -> None:
        validation = options["validation_data"]
        _check_model(model)
        _check_steps(data, validation, options)
        self.context = context
        self.epoch = -1
        self._model, self._shards = model, data
        self.data = ElasticData(data, context)
        self.validation = None if validation is None else ElasticData(validation, context)
        self._state = ModelState(model, context)
        self._index = 0  # of the next step, in the epoch or in the validation
        self._validates = False
        self._first_epoch = options["initial_epoch"]
        self._next: _Place = (0, _BEGIN, 0)  # the part under way
        self._goal: _Place = self._next  # earlier ones are left out
        self._held: Any = None  # the state of the step under way, which variables lack on JAX
        self._logs: Any = {}
        self._lacks_metrics = False  # of the step before the part under way
        self._knows_who_asks = False  # whether to join, in the next step
        self._functions: dict[str, Callable[..., Any]] = {}
        self._callbacks: list[Any] = []
        self._pending: dict[str, Any] = {}  # what a process that joins takes over within `fit`
        self.is_first_rank_zero = context.join is None and context.rank == 0

    # ---- before and after ----------------------------------------------------------------------

    def start(self) -> None:
        """Follow the parts from here on; join first, if this process has yet to."""
        if self.context.join is not None:
            self._next = _JOINS
            self.context.job, self.context.join = self.context.join(), None
            try:
                self._agree()
            except Exception as error:
                lost(error)
                self._regroup()
        self._replace_functions()

    def _replace_functions(self) -> None:
        self._functions.clear()
        self._model.train_function = partial(self._step, _TRAIN)
        self._model.test_function = partial(self._step, _TEST)

    def close(self) -> None:
        """Leave the model's functions to Keras."""
        self._model.train_function = self._model.test_function = None

    def options(self, given: dict[str, Any], sync: Any) -> dict[str, Any]:
        """Return arguments of Keras' `fit` in the place of those that the program has given.

        `sync` is the callback that comes last.
        """
        self._callbacks = for_all_ranks(given["callbacks"], given["verbose"], self)
        callbacks = [*self._callbacks, sync]
        options = {"callbacks": callbacks, "validation_data": self.validation, "verbose": 0}
        if self._pending:
            options["initial_epoch"] = self._goal[0]
        return options

    # ---- what callbacks ask --------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank."""
        return self.context.rank

    @property
    def is_behind(self) -> bool:
        """Whether this rank leaves out what others have done."""
        return self._next < self._goal

    def begin(self, sync: Callable[[], None]) -> None:
        """Compare the models, and what the ranks read."""

        def run() -> None:
            sync()
            self._first_epoch = self._model._initial_epoch or self._first_epoch
            self.data.at(self._first_epoch, 0)
            if isinstance(self._shards, BatchShards):
                compare_batches(self.context.group, self.data.batch)

        self._run((0, _BEGIN, 0), run)

    def begin_epoch(self, epoch: int) -> None:
        """Count the steps from 0."""
        self.epoch, self._index = epoch, 0

    def begin_test(self) -> None:
        """Count the steps from 0."""
        self._validates, self._index = True, 0

    def end_test(self) -> None:
        """Other evaluations are not parts of the training: callbacks may call for some."""
        self._validates = False

    def end_epoch(self, check: Callable[[], None]) -> None:
        """Compare the ranks, and tell them what rank 0 would need to know."""

        def run() -> None:
            check()
            group = self.context.group
            writers = [each for each in self._callbacks if isinstance(each, OnRankZero)]
            for writer in writers if self.rank == 0 else ():
                writer.repeat_epoch_end()
            states = states_of(writers) if self.rank == 0 else b""
            load_states(writers, group.exchange(states)[0])

        self._run((self.epoch, _EPOCH_END, 0), run)

    def end(self, wait: Callable[[], None]) -> None:
        """Wait for the others."""
        self._run(_END, wait)

    # ---- parts ---------------------------------------------------------------------------------

    def _run(self, place: _Place, part: Callable[[], Any]) -> Any:
        """Run a part, as often as ranks are lost in it; None if others have done it."""
        self._next = place
        while place >= self._goal:
            self._take_up()
            try:
                return part()
            except Exception as error:
                self._recover(error)
        return None

    def _step(self, kind: int, *args: Any) -> Any:
        """Run a step, in the place of Keras' function: of a batch of our own."""
        if kind == _TEST and not self._validates:
            return self._evaluation_step(*args)
        self._held = args[0] if len(args) > 1 else None
        if "callbacks" in self._pending:
            load_states([*self._callbacks, self._model.history], self._pending.pop("callbacks"))
        place, data = (self.epoch, kind, self._index), self.data
        self._index += 1
        if kind == _TEST:
            assert self.validation is not None
            data = self.validation
        result = self._run(place, lambda: self._train_or_test(place, data))
        held, self._held = self._held, None
        if result is None:
            return self._logs if held is None else (self._logs, held)
        self._logs = result if held is None else result[0]
        return result

    def _evaluation_step(self, *args: Any) -> Any:
        """Run Keras' own function."""
        ours, self._model.test_function = self._model.test_function, None
        try:
            if "evaluate" not in self._functions:
                self._model.make_test_function()
                self._functions["evaluate"] = self._model.test_function
            return self._functions["evaluate"](*args)
        finally:
            self._model.test_function = ours

    def _train_or_test(self, place: _Place, data: ElasticData) -> Any:
        batch = data.at(place[0], place[2])
        if place[1] == _TRAIN and not self._knows_who_asks and self._job.is_asked():
            self._regroup()
            batch = data.at(place[0], place[2])
        self._state.save()
        name = "train_step" if place[1] == _TRAIN else "test_step"
        if name not in self._functions:
            self._functions[name] = self.context.backend.compiled(self._model, name)
        result = self._functions[name](*(() if self._held is None else (self._held,)), batch)
        self._state.keep()
        self._knows_who_asks &= place[1] != _TRAIN
        return result

    # ---- other ranks ---------------------------------------------------------------------------

    @property
    def _job(self) -> Any:
        return self.context.job

    def _recover(self, error: Exception) -> None:
        """Go on with the ranks that are left."""
        try:
            self.context.group.raise_if_failed(error)
        except SdpError as failure:
            lost(failure)
        else:
            lost(error)
        if self._state.undo() and self._next[1] == _TRAIN:
            epoch, kind, index = self._next
            self._next, self._lacks_metrics = (epoch, kind, index + 1), True
        self._regroup(admits=False)

    def _regroup(self, admits: bool = True) -> None:
        """Make a group of the ranks that are there, and bring all to the same part."""
        with self._in_variables():
            while True:
                self._job.regroup(admits=admits)
                try:
                    return self._agree()
                except Exception as error:
                    lost(error)

    @contextmanager
    def _in_variables(self) -> Iterator[None]:
        """Have all values in the variables, also those that a step on JAX has as its argument."""
        if self._held is not None:
            self.context.backend.attach_state(self._model, self._held)
        yield
        if self._held is not None:
            self._held = self.context.backend.detach_state(self._model, self._held)

    def _agree(self) -> None:
        self.context.adopt(self._job.group)
        self._replace_functions()
        # Of ranks that have not averaged what layers have noted in the step, all take over one's.
        order = -1 - self.rank if self._lacks_metrics else 0
        catch_up(
            self._job.group,
            (*self._next, order),
            lambda part: send(part, self._own_state()),
            lambda part: self._load(receive(part)),
        )
        self._goal, self._lacks_metrics = self._next, False
        self._knows_who_asks = True

    def _own_state(self) -> dict[str, Any]:
        place = self.data.place
        return {
            **self._state.values(),
            "next": self._next,
            "first epoch": self._first_epoch,
            "logs": keras.tree.map_structure(keras.ops.convert_to_numpy, self._logs),
            "data": (*place, self.data.state()),
            "callbacks": states_of([*self._callbacks, self._model.history]),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self._state.load(state)
        joins = self._next == _JOINS
        self._next = tuple(state["next"])
        self._first_epoch, self._logs = state["first epoch"], state["logs"]
        if joins:
            epoch, index, other = state["data"]
            self.data.go_to(epoch - self._first_epoch, epoch, index, other)
            self._pending = state
            self.context.replays = True
            seeds = seed_states(self._model)
            assign(seeds, state["seeds"])
            number = self._job.group.global_ranks[self.rank]
            diversify(1 + number + 101 * (epoch * 10007 + index), seeds)

    def _take_up(self) -> None:
        """Set what Keras and callbacks have changed in a process since it joined."""
        if not self._pending:
            return
        with self._in_variables():
            self._state.load(self._pending)
        self._pending, self.context.replays = {}, False


def _check_model(model: Any) -> None:
    """Check that all that a rank knows is in variables, or known to others.

    Raises:
        ValueError: It is not.
    """
    for optimizer in optimizers_of(model):
        if optimizer.gradient_accumulation_steps:
            raise ValueError(
                f"optimizer '{optimizer.name}' accumulates gradients: a lost rank's would be "
                "missing. Hint: with elastic=True, use larger batches instead."
            )
    if model.steps_per_execution != 1:
        raise ValueError(
            f"model '{model.name}': steps_per_execution={model.steps_per_execution}: elastic=True "
            "repeats single steps. Hint: compile it with steps_per_execution=1."
        )


def _check_steps(data: Any, validation: Any, options: dict[str, Any]) -> None:
    """Check that each epoch and each validation uses all batches.

    Raises:
        ValueError: One does not.
    """
    for name, source in (("steps_per_epoch", data), ("validation_steps", validation)):
        steps = options[name]
        if source is not None and steps not in (None, source.num_batches):
            raise ValueError(
                f"fit({name}={steps}): with elastic=True, a rank that joins finds its place by the "
                f"number of the batch in the whole data. Hint: leave {name} out."
            )
