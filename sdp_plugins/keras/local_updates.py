"""A callback by which ranks train by themselves, and average what they have learnt now and then."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from sdp_plugins.core import Group
from sdp_plugins.core.local_updates.background import background
from sdp_plugins.core.local_updates.outer_step import OuterStep
from sdp_plugins.core.local_updates.parameters import Floats, describe, divide
from sdp_plugins.core.local_updates.schedule import Schedule
from sdp_plugins.core.local_updates.updates import LocalUpdates
from sdp_plugins.core.local_updates.wire import parse_wire

from .model_patch import attached_to
from .variables import broadcast

_NAME = "keras local updates"
log = logging.getLogger("sdp_plugins.keras")


class SMDDPLocalUpdates(keras.callbacks.Callback):
    """Has the ranks exchange weights every so many batches, in place of gradients in each one.

    ::

        model.fit(x[rank::ranks], y[rank::ranks], callbacks=[SMDDPLocalUpdates(every=30)])

    Each rank trains on its data alone, as the model does without a strategy. The ranks' models are
    equal when `fit` begins and when it ends. All ranks must train as many batches. What the
    arguments mean, and how the ranks of a node average gradients in every step, is in
    docs/slow-networks.md. Counters and statistics, such as those of BatchNormalization, are those
    of rank 0 after each round.

    Args:
        every: Batches from one outer step to the next one; calls, with ``steps_per_execution``.
        outer: ``"average"`` (local SGD), ``"nesterov"`` (DiLoCo), or an `OuterStep`.
        wire: How values travel between nodes; None: exactly.
        fragments: Number of parts of the model that take their outer steps in turn.
        delay: Batches that a rank goes on while its weights travel. What it learns in them it
            keeps.
        group: Ranks that nothing else uses; None: all ranks of the job. It has a wire dtype of its
            own.
    """

    def __init__(
        self,
        every: int = 30,
        outer: OuterStep | str = "average",
        wire: str | None = None,
        fragments: int = 1,
        delay: int = 0,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        if group is not None and wire is not None:
            raise ValueError(f"wire={wire!r}: a group that is given has its own wire dtype.")
        wire = parse_wire(wire)
        self._schedule = Schedule(every, fragments, delay)
        self._outer = OuterStep.parse(outer)
        with background():
            self._group = group or Group.from_env(name=_NAME, wire_dtype=wire)
        self._updates: LocalUpdates | None = None
        self._trained: list[int] | None = None
        self._state: Mapping[str, Any] | None = None

    @property
    def group(self) -> Group:
        """The ranks."""
        return self._group

    def on_train_begin(self, logs: Any = None) -> None:
        """Give all ranks rank 0's weights, unless each goes on from its own state."""
        strategy = attached_to(self.model)
        if strategy is not None and strategy.group.world_size == self._group.world_size > 1:
            log.warning(
                "SMDDPLocalUpdates: the model's strategy averages the gradients of all these ranks "
                "in each step already. Hint: on several nodes, give SMDDPStrategy the group of a "
                "node."
            )
        variables = list(map(id, self.model.trainable_variables))
        if self._trained != variables:  # another model, or layers were frozen or thawed
            if not self.model.built:
                raise ValueError(
                    f"SMDDPLocalUpdates: model '{self.model.name}' has no weights yet that the "
                    "ranks could have in common. Hint: begin it with keras.Input, or call build()."
                )
            self._trained = variables
            parameters = _Weights(self.model, self._schedule.fragments)
            self._updates = LocalUpdates(
                self._group, parameters, self._schedule, self._outer, self._share_statistics
            )
        assert self._updates is not None
        state, self._state = self._state, None
        if state is None:
            self._updates.share()
        else:
            self._updates.load_state_dict(state)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batch, and exchange what is due."""
        assert self._updates is not None
        self._updates.step()

    def on_train_end(self, logs: Any = None) -> None:
        """Make the ranks' models equal."""
        assert self._updates is not None
        self._updates.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, in NumPy arrays.

        To continue exactly, each rank saves it beside its own model (``model.save(...)``, which
        has the optimizer's state), and loads both.

        Raises:
            RuntimeError: The model was not trained yet.
        """
        if self._updates is None:
            raise RuntimeError("SMDDPLocalUpdates: there is no state before `fit` has begun.")
        return self._updates.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next `fit` begin with this rank's state, and with each rank's own weights."""
        self._state = state

    def close(self) -> None:
        """Leave the group."""
        if self._updates is not None:
            self._updates.close()
        self._group.close()

    def _share_statistics(self) -> None:
        _write_back(self.model)
        # Without seeds: each rank has random numbers of its own.
        broadcast(self._group, self.model.non_trainable_weights, 0)


class _Weights:
    """A model's trainable variables, in fragments of about equal size."""

    def __init__(self, model: Any, fragments: int) -> None:
        self._model = model
        variables = model.trainable_variables
        for variable in variables:
            if variable.dtype not in ("float32", "bfloat16", "float16"):
                raise ValueError(
                    f"local updates: weights of {variable.dtype} would be rounded to float32. "
                    "Hint: float32, bfloat16 or float16."
                )
        # Names within layers: Keras numbers layers over all models of a process.
        self.described: Sequence[str] = [
            describe(one.name, one.shape, one.dtype, one.trainable) for one in model.weights
        ]
        sizes = [int(np.prod(variable.shape)) for variable in variables]
        parts = divide(sizes, fragments)
        self._fragments = [[variables[index] for index in part] for part in parts]
        self.counts: Sequence[int] = [sum(sizes[index] for index in part) for part in parts]

    def read(self, fragment: int, values: Floats) -> None:
        """Write a fragment's values to `values`."""
        for variable, part in self._parts(fragment, values):
            part[...] = ops.convert_to_numpy(variable)

    def gap(self, fragment: int, anchor: Floats, gap: Floats) -> None:
        """Write `anchor - x` for each value x to `gap`."""
        starts = (start for _, start in self._parts(fragment, anchor))
        for (variable, part), start in zip(self._parts(fragment, gap), starts, strict=True):
            # A weight of 16 bits holds the anchor rounded, which is no progress.
            np.subtract(_rounded(start, variable), ops.convert_to_numpy(variable), out=part)

    def rounded(self, fragment: int, values: Floats) -> Floats | None:
        """`values` as the weights hold them; None: exactly."""
        variables = self._fragments[fragment]
        if all(variable.dtype == "float32" for variable in variables):
            return None
        parts = self._split(fragment, values)
        return np.concatenate([_rounded(part, variable).ravel() for variable, part in parts])

    def write(self, fragment: int, values: Floats) -> None:
        """Make `values` those of a fragment."""
        for variable, part in self._parts(fragment, values):
            variable.assign(part.copy())  # backends may keep what they are given

    def add(self, fragment: int, changes: Floats) -> None:
        """Add `changes` to the values of a fragment."""
        for variable, part in self._parts(fragment, changes):
            variable.assign(np.asarray(ops.convert_to_numpy(variable), np.float32) + part)

    def _parts(self, fragment: int, values: Floats) -> Iterator[tuple[Any, Floats]]:
        _write_back(self._model)
        return self._split(fragment, values)

    def _split(self, fragment: int, values: Floats) -> Iterator[tuple[Any, Floats]]:
        begin = 0
        for variable in self._fragments[fragment]:
            end = begin + int(np.prod(variable.shape))
            yield variable, values[begin:end].reshape(variable.shape)
            begin = end


def _rounded(values: Floats, variable: Any) -> Floats:
    held = values.astype(variable.dtype, copy=False)  # Keras teaches NumPy bfloat16
    return held.astype(np.float32, copy=False)


def _write_back(model: Any) -> None:
    """Have Keras on JAX, whose trainer holds the newest values, put them into the variables."""
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()
