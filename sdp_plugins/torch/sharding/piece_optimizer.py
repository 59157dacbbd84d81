"""torch's optimizer on the pieces that this rank updates."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sdp_plugins.core import Group
from sdp_plugins.torch.sharding.layout import Layout, Piece
from sdp_plugins.torch.sharding.masters import MasterWeights
from sdp_plugins.torch.sharding.state import ShardedState
from sdp_plugins.torch.sharding.weights import NodeWeights, like

Groups = Sequence[dict[str, Any]]


class PieceOptimizer:
    """Updates this rank's pieces of the weights, and has their state.

    Args:
        plain: The program's optimizer, which gives its settings and its state away.
        group: All ranks.
        layout: Of the parameters.
        parameters: In the order of the optimizer's.
        weights: Of the layout.
        has_masters: Whether float32 copies of 16-bit weights are updated.

    Attributes:
        pieces: What this rank updates, and the tensors that the optimizer has of them.
    """

    def __init__(
        self,
        plain: torch.optim.Optimizer,
        group: Group,
        layout: Layout,
        parameters: Sequence[Tensor],
        weights: NodeWeights,
        has_masters: bool,
    ) -> None:
        self._masters = MasterWeights(has_masters)
        self._optimizer = copy.copy(plain)  # what torch pickles
        for name, value in plain.__dict__.items():
            if name not in self._optimizer.__dict__ and name != "step":  # which schedulers wrap
                setattr(self._optimizer, name, value)
        self._optimizer.param_groups = [{**each, "params": []} for each in plain.param_groups]
        self.pieces: list[tuple[Piece, nn.Parameter]] = []
        for piece in layout.pieces(group.rank):
            mine, seen = (
                each[piece.bucket][piece.start : piece.stop]
                for each in (weights.buckets, weights.views)
            )
            if layout.by_parameter:
                parameter = parameters[piece.slot.parameter]
                mine, seen = like(parameter, mine, 0), like(parameter, seen, 0)
            tensor = self._masters.add(mine, seen)
            self._optimizer.param_groups[piece.slot.group]["params"].append(tensor)
            self.pieces.append((piece, tensor))
        self._state = ShardedState(group, layout, parameters, self.pieces)
        self.take_state(plain.state_dict()["state"], loads=False)
        plain.state.clear()

    def dtype_of(self, weights: Tensor) -> torch.dtype:
        """The type in which weights are updated."""
        return self._masters.dtype_of(weights)

    def step(self) -> None:
        """Update the pieces by their ``grad``; those without are left alone."""
        self._masters.follow()
        self._optimizer.step()
        self._masters.write()

    @torch.no_grad()
    def leave_weights(self, group: Group) -> None:
        """Keep the state, which is gathered by another group from now on."""
        self._state.group = group
        copies = self._masters.leave_weights()
        for _, tensor in self.pieces:
            tensor.grad = None
            if tensor not in copies:  # which are a part of the state
                tensor.data = tensor.new_empty(()).expand(tensor.shape)

    def check_settings(self, groups: Groups) -> None:
        """Refuse a checkpoint of another class of optimizer, with which plain ones fail in a step.

        Raises:
            ValueError: Its parameter groups have other settings, and lack some.
        """
        taken = copy.copy(self._optimizer)
        loaded = [{**but_params(group), "params": []} for group in groups]
        taken.__setstate__({"state": {}, "param_groups": loaded})  # adds what older versions lack
        for group, mine in zip(loaded, self._optimizer.param_groups, strict=True):
            missing = [name for name in taken.defaults if name in mine and name not in group]
            others = [name for name in group if name not in mine]
            if missing and others:
                raise ValueError(
                    f"load_state_dict(): the state is not of {type(taken).__name__}: it has no "
                    f"{', '.join(missing)}, but {', '.join(others)}. Hint: load the state of the "
                    "same class of optimizer, or begin with a new one."
                )

    def use_settings(self, groups: Groups) -> None:
        """Take what schedulers and users have set in the program's parameter groups."""
        for outer, inner in zip(groups, self._optimizer.param_groups, strict=True):
            inner.update(but_params(outer))

    def give_settings(self, groups: Groups) -> None:
        """Put what the optimizer has set, as counters, into the program's parameter groups."""
        for outer, inner in zip(groups, self._optimizer.param_groups, strict=True):
            outer.update(but_params(inner))

    @torch.no_grad()
    def gather_state(self, to: int | None) -> dict[Any, Any]:
        """The plain optimizer's state of all parameters, by index; a collective.

        Args:
            to: The rank that gets it; None: all.
        """
        self._masters.follow()
        state: dict[Any, Any] = {**self._optimizer.state}
        others = {key: state.pop(key) for key in list(state) if not isinstance(key, Tensor)}
        return {**self._state.gather(self._masters.add_to(state), to), **others}

    def take_state(self, state: Mapping[Any, Any], loads: bool = True) -> None:
        """Take this rank's part of a plain optimizer's state.

        Args:
            state: Of all parameters, by index.
            loads: Whether it is of a checkpoint, perhaps of an older version of torch.
        """
        mine = self._state.scatter(state, loads)
        self._masters.take_from(mine)
        others = {key: value for key, value in state.items() if not isinstance(key, int)}
        taken = defaultdict(dict, {**mine, **copy.deepcopy(others)})
        self._optimizer.state = taken
        if loads:  # what torch's load_state_dict() calls
            groups = self._optimizer.param_groups
            self._optimizer.__setstate__({"state": taken, "param_groups": groups})


def but_params(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's settings."""
    return {name: value for name, value in group.items() if name != "params"}


def settings_of(groups: Groups) -> dict[str, object]:
    """The settings of parameter groups, by names for messages."""
    return {
        f"{name} of parameter group {i}": value
        for i, group in enumerate(groups)
        for name, value in but_params(group).items()
    }
