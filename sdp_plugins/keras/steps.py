"""One step of training, evaluation or prediction on this rank's rows of a batch.

The results of a step are global. Weights follow from averaged gradients. The state of layers
(BatchNormalization) is the mean of the ranks' states, weighted by their rows. Metrics are as if one
process had seen the whole batch. Callbacks on all ranks therefore decide alike, after every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
from keras import ops

from . import metrics
from .batch_shard import DATA, WHOLE, BatchShard, first_leaf, is_marked
from .running_step import RunningStep, running, shard_of_step

if TYPE_CHECKING:
    from .context import TrainingContext

_Function = Callable[..., Any]


class Step:
    """The parts that both kinds of backends share."""

    def __init__(self, model: Any, context: TrainingContext) -> None:
        self._model = model
        self._context = context

    @property
    def _backend(self) -> Any:
        return self._context.backend

    @property
    def _position(self) -> tuple[int, int]:
        return self._context.rank, self._context.world_size

    def _open(self, data: Any) -> tuple[Any, BatchShard]:
        """Return this rank's rows, of a cut batch or of a whole one, and their shard."""
        metrics.patch_metrics(self._model)  # metrics added since the previous step
        self._backend.begin()
        if is_marked(data):
            data = self._backend.compare(data)
            shard = BatchShard.of(data[DATA], self._backend.length(data[WHOLE]), *self._position)
            return shard.batch, shard
        count = self._backend.length(first_leaf(data))
        batch = self._backend.cut(data, *self._backend.rows_to_read(count, *self._position))
        return batch, BatchShard.of(batch, count, *self._position)

    def _adding_up(self) -> list[Any]:
        """Return the variables of metrics whose states are summed."""
        return [
            variable
            for metric in metrics.flat(self._model)
            if metrics.adds_up(metric)
            for variable in metric.variables
        ]

    def _layer_states(self) -> list[Any]:
        """Return the variables that layers update themselves."""
        return [
            variable
            for layer in self._model._flatten_layers()
            for variable in layer._non_trainable_variables
            if "float" in str(variable.dtype)
        ]

    def _total(
        self,
        step: RunningStep,
        sums: Sequence[Any],
        changes: Sequence[Any],
        logs: Any,
    ) -> tuple[list[Any], list[Any], dict[str, Any]]:
        """Return sums over ranks, weighted means over ranks, and means of logs without a metric."""
        own, shard = self._own_logs(step, logs), step.shard
        tensors = [shard.times(tensor, 1) for tensor in sums]
        tensors += [shard.times(tensor, shard.weight) for tensor in (*changes, *own.values())]
        totals = self._backend.all_reduce(tensors) if tensors else []
        first, second = len(sums), len(sums) + len(changes)
        means = dict(zip(own, totals[second:], strict=True))
        return totals[:first], totals[first:second], means

    def _own_logs(self, step: RunningStep, logs: Any) -> dict[str, Any]:
        if not isinstance(logs, dict):
            return {}
        kept = self._kept_names(step, self._model.get_metrics_result())
        found = {}
        for name, value in logs.items():
            if name not in kept and id(value) not in step.results:
                tensor = ops.convert_to_tensor(value)
                if "float" in ops.dtype(tensor):
                    found[name] = tensor
        return found

    def _kept_names(self, step: RunningStep, results: dict[str, Any]) -> set[str]:
        """Return the logs that metrics hold; a step without Keras' loss may use its name itself."""
        tracker = self._model._loss_tracker
        return set(results) - (set() if id(tracker) in step.updated else {tracker.name})

    def _new_logs(self, step: RunningStep, logs: Any, means: dict[str, Any]) -> Any:
        if not isinstance(logs, dict):
            return logs
        results = self._model.get_metrics_result()
        kept = self._kept_names(step, results)
        new = dict(logs)
        for name, value in logs.items():
            if name in means:
                new[name] = means[name]
            elif id(value) in step.results:
                new[name] = step.results[id(value)][1].result()
            elif name in kept:
                new[name] = results[name]
        return new


class StatefulStep(Step):
    """A step on backends whose variables hold their values: TensorFlow and torch."""

    def train(self, function: _Function, data: Any) -> Any:
        """Run one training step and return its logs."""

        def run(batch: Any) -> Any:
            with self._backend.training(self._model, shard_of_step(self._backend)):
                return function(batch)

        return self._run(run, data, self._layer_states())

    def test(self, function: _Function, data: Any) -> Any:
        """Run one step of an evaluation and return its logs."""
        return self._run(function, data, [])

    def predict(self, function: _Function, data: Any) -> Any:
        """Run one step of a prediction; return its outputs and the size of the batch."""
        batch, shard = self._open(data)
        return function(batch), ops.reshape(ops.convert_to_tensor(shard.count), (1,))

    def _run(self, function: _Function, data: Any, layers: Sequence[Any]) -> Any:
        backend = self._backend
        batch, shard = self._open(data)
        sums = self._adding_up()
        with backend.control_dependencies(batch):
            before = [backend.read(variable) for variable in (*sums, *layers)]
            for variable in sums:  # starting from zero makes their change exact
                variable.assign(ops.zeros(variable.shape, variable.dtype))
        step = RunningStep(shard, self._backend)
        with running(step):
            logs = function(batch)
        after = [backend.read(variable) for variable in (*sums, *layers)]
        split = len(sums)
        changes = list(map(_change, before[split:], after[split:]))
        with backend.after_updates(self._model):
            totals, moved, means = self._total(step, after[:split], changes, logs)
        for variable, old, total in zip(sums, before[:split], totals, strict=True):
            variable.assign(old + total)
        for variable, old, change in zip(layers, before[split:], moved, strict=True):
            variable.assign(_changed(old, change))
        return self._new_logs(step, logs, means)


class StatelessStep(Step):
    """A step on JAX: it takes all values as arguments and returns new ones."""

    def train(self, function: _Function, state: Any, data: Any) -> Any:
        """Run one training step; return its logs and the new state."""
        trainable, others, optimizer, measured = state
        layers = self._layer_states()

        def run(batch: Any, measured: Any) -> Any:
            logs, (new, others_after, optimizer_after, measured) = function(
                (trainable, others, optimizer, measured), batch
            )
            return logs, (new, optimizer_after), others_after, measured

        logs, (trainable, optimizer), others, measured = self._run(
            run, data, others, measured, layers
        )
        return logs, (trainable, others, optimizer, measured)

    def test(self, function: _Function, state: Any, data: Any) -> Any:
        """Run one step of an evaluation; return its logs and the new state."""
        trainable, others, measured = state

        def run(batch: Any, measured: Any) -> Any:
            logs, (_, others_after, measured) = function((trainable, others, measured), batch)
            return logs, None, others_after, measured

        logs, _, others, measured = self._run(run, data, others, measured, [])
        return logs, (trainable, others, measured)

    def predict(self, function: _Function, state: Any, data: Any) -> Any:
        """Run one step of a prediction; return its outputs, the batch size, and the state."""
        batch, shard = self._open(data)
        outputs, others = function(state, batch)
        return (outputs, ops.convert_to_tensor([shard.count])), others

    def _run(
        self, function: _Function, data: Any, others: Any, measured: Any, layers: Sequence[Any]
    ) -> Any:
        batch, shard = self._open(data)
        variables = self._model.metrics_variables
        sums = _indices(variables, self._adding_up())
        moving = _indices(self._model.non_trainable_variables, layers)
        blank = list(measured)
        for index in sums:
            blank[index] = ops.zeros_like(measured[index])
        step = RunningStep(shard, self._backend)
        with running(step):
            logs, rest, others_after, after = function(batch, blank)
        after, others_after = list(after), list(others_after)
        changes = [_change(others[index], others_after[index]) for index in moving]
        with keras.StatelessScope(state_mapping=list(zip(variables, after, strict=True))):
            totals, moved, means = self._total(
                step, [after[index] for index in sums], changes, logs
            )
        for index, total in zip(sums, totals, strict=True):
            after[index] = measured[index] + total
        for index, change in zip(moving, moved, strict=True):
            others_after[index] = _changed(others[index], change)
        with keras.StatelessScope(state_mapping=list(zip(variables, after, strict=True))):
            logs = self._new_logs(step, logs, means)
        return logs, rest, others_after, after


def _change(old: Any, new: Any) -> Any:
    """Return the difference to average over ranks; an unchanged value stays exact (zeros)."""
    return ops.where(ops.isfinite(old), new - old, new)


def _changed(old: Any, change: Any) -> Any:
    """Apply a change; an infinite value, as in a mask, has no difference and is replaced."""
    return ops.where(ops.isfinite(old), old + change, change)


def _indices(variables: Sequence[Any], some: Sequence[Any]) -> list[int]:
    """Return the positions of some of the variables."""
    wanted = {id(variable) for variable in some}
    return [index for index, variable in enumerate(variables) if id(variable) in wanted]
