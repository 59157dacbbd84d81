"""Keras on torch: the ranks of a node have the weights once, and each updates a shard of them.

The parts are those of torch's `ShardedOptimizer`: see docs/sharding.md. Keras' own optimizer makes
the update; meanwhile, the variables of the model and of the optimizer hold this rank's elements
only. Between steps they are as ever, and whole on all ranks.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from sdp_plugins.core import Group, SdpError
from sdp_plugins.torch.sharding.averages import Averages
from sdp_plugins.torch.sharding.checks import find_mistake
from sdp_plugins.torch.sharding.gradients import GradientBuckets
from sdp_plugins.torch.sharding.layout import lay_out
from sdp_plugins.torch.sharding.weights import NodeWeights, can_tell_writes
from sdp_plugins.torch.tensors import DTYPES

from ..gradients import PATCHES, was_overridden
from ..keras_internals import is_of_keras
from ..rank_consistency import gradient_on_some_ranks


def can_shard(group: Group, optimizer: Any, variables: Sequence[Any]) -> bool:
    """Return whether an update by shards gives the same weights: each element by itself."""
    return (
        group.local_size == group.world_size
        and hasattr(optimizer, "_parallel_update_step")
        and is_of_keras(type(optimizer))
        and _is_by_element(optimizer, variables)
        and len(variables) > 0
        and all(
            id(variable) in optimizer._trainable_variables_indices
            and not variable.overwrite_with_gradient
            and variable._value.dtype in DTYPES
            for variable in variables
        )
        and not _is_overridden(optimizer)
        and not find_mistake([v._value for v in variables], [v.path for v in variables])
        and _states(optimizer) is not None
        and can_tell_writes()
    )


def _is_overridden(optimizer: Any) -> bool:
    """Return whether an optimizer has functions of the program's own, which may need all elements.

    Among them is a learning rate that is a function.
    """
    own = [value for value in vars(optimizer).values() if inspect.isroutine(value)]
    return was_overridden(optimizer) or any(each.__module__ != PATCHES for each in own)


def _is_by_element(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Return whether an optimizer of Keras neither clips by norms nor constrains variables."""
    clips = optimizer.clipnorm or optimizer.global_clipnorm
    return not clips and all(variable.constraint is None for variable in variables)


def _states(optimizer: Any) -> list[list[Any]] | None:
    """Return the lists with a state for each variable; None if there are states of other shapes."""
    variables = optimizer._trainable_variables
    lists = [
        members
        for name, members in vars(optimizer).items()
        if isinstance(members, list)
        and name not in ("_variables", "_trainable_variables")
        and len(members) == len(variables)
        and all(
            getattr(state, "shape", None) == variable.shape and state.dtype == variable.dtype
            for state, variable in zip(members, variables, strict=True)
        )
    ]
    known = {id(state) for members in lists for state in members}
    others = [state for state in optimizer.variables if id(state) not in known]
    return None if any(state.shape != () for state in others) else lists


class ShardedUpdate:
    """Averages the gradients of a step and updates by shards; making it is a collective.

    Args:
        group: All ranks, on one node.
        optimizer: Keras'.
        variables: Those that the model trains.

    Attributes:
        done: Whether the gradients of the step are averaged.
    """

    def __init__(self, group: Group, optimizer: Any, variables: Sequence[Any]) -> None:
        self.done = False
        self._group, self._optimizer, self._variables = group, optimizer, list(variables)
        parameters = [variable._value for variable in variables]
        # One bucket for each type: nothing is sent, so that nothing is gained by sending it early.
        layout = lay_out(parameters, [0] * len(parameters), group.world_size, sys.maxsize)
        parts = sorted(layout.parts(group.rank), key=lambda piece: piece.slot.parameter)
        indices = [optimizer._get_variable_index(variable) for variable in variables]
        states = [[members[index] for index in indices] for members in _states(optimizer) or ()]
        self._memories: list[NodeWeights] = []
        self._shards: list[tuple[Any, torch.Tensor]] = []
        for members in (self._variables, *states):
            for variable, parameter in zip(members, parameters, strict=True):
                _order_like(parameter, variable._value)
            memory = NodeWeights(group, layout, [variable._value for variable in members])
            shards = [memory.buckets[part.bucket][part.start : part.stop] for part in parts]
            self._memories.append(memory)
            self._shards += zip(members, shards, strict=True)
        self._places = self._find_places()
        names = [variable.path for variable, _ in self._shards]
        self._gradients = GradientBuckets(
            group,
            group,
            layout,
            parameters,
            names[: len(parameters)],
            watched=names,
            owner="SMDDPStrategy",
        )
        self._gradients.synchronizing = False
        # The hooks on parameters would keep all memory, and no garbage collector sees them.
        self._end = weakref.finalize(self, self._gradients.leave_parameters)
        self._end.atexit = False
        self._weights = {id(variable): shard for variable, shard in self._shards[: len(parameters)]}
        pieces = list(zip(parts, self._weights.values(), strict=True))
        self._averages = Averages(group, self._gradients, pieces)

    def serves(self, optimizer: Any, variables: Sequence[Any]) -> bool:
        """Return whether it can update these variables, whose values nobody has replaced."""
        return (
            optimizer is self._optimizer
            and _is_by_element(optimizer, variables)
            and [id(variable) for variable in variables] == list(self._weights)
            and self._find_places() == self._places
        )

    def _find_places(self) -> list[tuple[int, int]]:
        values = (variable._value for variable, _ in self._shards)
        return [(id(value), value.data_ptr()) for value in values]

    def leave(self) -> None:
        """Leave the variables to another update, or to none."""
        self._end()

    @contextmanager
    def averaging(self, factor: float) -> Iterator[None]:
        """Return a context for a backward pass and an update.

        Args:
            factor: Weight of this rank's gradients.
        """
        self.done, self._gradients.synchronizing = False, True
        try:
            with ExitStack() as stack:
                if factor != 1:
                    for variable in self._variables:
                        hook = variable._value.register_hook(lambda g: _weighted(g, factor))
                        stack.callback(hook.remove)
                yield
        finally:
            self._gradients.synchronizing = False
            self._averages.drop()

    @torch.no_grad()
    def update(
        self, apply: Callable[..., Any], optimizer: Any, grads: Sequence[Any], variables: Any
    ) -> Any:
        """Run an optimizer's ``apply`` on this rank's shards of averages, which replace `grads`.

        Raises:
            RuntimeError: Only some ranks have a gradient of a variable, or have changed it.
            SdpError: A rank was lost or gave up.
        """
        if optimizer is not self._optimizer:
            return apply(grads, variables)
        count = len(self._variables)
        new = {
            i * count + n: digest
            for i, memory in enumerate(self._memories)
            for n, digest in memory.changed().items()
        }
        self._averages.compute(new)
        self.done = True
        if self._gradients.uneven:
            raise gradient_on_some_ranks(self._variables[max(self._gradients.uneven)])
        for memory in self._memories:
            memory.take()
        with self._as_shards():
            result = apply([self._weights[id(variable)].grad for variable in variables], variables)
        try:
            self._group.barrier()
        except SdpError as error:
            text = "The weights are partly of this step, and partly of the one before."
            error.args = (f"{error} {text}",)
            raise
        self._memories[0].tell_autograd(self._gradients.unused)
        return result

    @contextmanager
    def _as_shards(self) -> Iterator[None]:
        """Have each variable hold this rank's elements."""
        whole = [(variable, variable._value, variable._shape) for variable, _ in self._shards]
        try:
            for variable, shard in self._shards:
                variable._value, variable._shape = shard, tuple(shard.shape)
            yield
        finally:
            for variable, value, shape in whole:
                variable._value, variable._shape = value, shape


def _order_like(parameter: torch.Tensor, state: torch.Tensor) -> None:
    """Have a state's elements lie in memory in the order of the parameter's."""
    if state.stride() != parameter.stride():
        state.data = torch.empty_like(parameter.detach()).copy_(state.detach())


def _weighted(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a rank's gradient with its weight; that of a shard without rows may be NaN."""
    return gradient * factor if factor else torch.zeros_like(gradient)
