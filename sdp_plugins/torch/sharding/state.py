"""An optimizer's state in the form of the plain optimizer: a tensor for each parameter."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from sdp_plugins.core import Group
from sdp_plugins.torch.sharding.layout import Layout, Piece
from sdp_plugins.torch.sharding.weights import like

State = dict[str, Any]
OF_ALL = ("step", "mu_product")
"""The states of torch's optimizers that are one tensor for all elements of a parameter."""


class ShardedState:
    """Gathers and scatters the state of this rank's pieces.

    Args:
        group: All ranks.
        layout: Of the parameters.
        parameters: In the order of the optimizer's.
        pieces: This rank's, and their tensors.

    Attributes:
        group: See above; may be another one of the same ranks later.
    """

    def __init__(
        self,
        group: Group,
        layout: Layout,
        parameters: Sequence[Tensor],
        pieces: Sequence[tuple[Piece, Tensor]],
    ) -> None:
        self.group, self._layout, self._parameters = group, layout, parameters
        self._pieces = pieces

    def gather(self, state: Mapping[Tensor, State], to: int | None = None) -> dict[int, State]:
        """The state of all parameters; a collective.

        Args:
            state: This rank's, by the tensor of each piece.
            to: The rank that gets it, the others get none; None: all get it.
        """
        if self._layout.by_parameter:
            return self._gather_parameters(state, to)
        kinds = self._kinds(state)
        whole: dict[int, State] = {}
        for index, bucket in enumerate(self._layout.buckets):
            gathered: dict[str, Tensor] = {}
            for slot in bucket.slots:
                for name, kind in kinds.get(slot.parameter, {}).items():
                    mine = whole.setdefault(slot.parameter, {})
                    if not isinstance(kind, torch.dtype):
                        mine[name] = _copied(kind)
                        continue
                    if name not in gathered:
                        gathered[name] = self._gather_bucket(index, name, kind, state, to)
                    if to not in (None, self.group.rank):
                        continue
                    parameter = self._parameters[slot.parameter]
                    mine[name] = like(parameter, gathered[name], slot.start).clone()
        return dict(sorted(whole.items())) if to in (None, self.group.rank) else {}

    def scatter(self, whole: Mapping[Any, State], loads: bool) -> dict[Tensor, State]:
        """This rank's part of the state of all parameters, by the tensor of each piece.

        Args:
            whole: By index.
            loads: Whether it is of a checkpoint, and gets the parameters' types; else it keeps
                its own where pieces have the parameters' types.
        """
        self._check_shapes(whole)
        state: dict[Tensor, State] = {}
        for index, pieces in groupby(self._pieces, lambda item: item[0].slot.parameter):
            tensors = list(pieces)
            for name, value in whole.get(index, {}).items():
                parameter = self._parameters[index]
                if loads or tensors[0][1].dtype is not parameter.dtype:
                    value = _as_loaded(name, value, tensors[0][1])
                each = _of_each_element(name, value, parameter)
                flat = _flat(value, parameter) if each else value
                for piece, tensor in tensors:
                    part = like(tensor, flat, piece.start - piece.slot.start) if each else flat
                    state.setdefault(tensor, {})[name] = _copied(part)
        return state

    def _check_shapes(self, whole: Mapping[Any, State]) -> None:
        """Refuse the state of another model, on all ranks."""
        for index, parameter in enumerate(self._parameters):
            for name, value in whole.get(index, {}).items():
                if self._layout.by_parameter or name in OF_ALL or not isinstance(value, Tensor):
                    continue
                if value.dim() > 0 and value.shape != parameter.shape:
                    raise ValueError(
                        f"ShardedOptimizer: {name} of parameter {index} has the shape "
                        f"{tuple(value.shape)}, and the parameter {tuple(parameter.shape)}. Hint: "
                        "load a state of the same model."
                    )

    def _gather_parameters(self, state: Mapping[Tensor, State], to: int | None) -> dict[int, State]:
        """The state of parameters, of which each is one rank's."""
        group = self.group
        mine = {
            piece.slot.parameter: {name: _alone(value) for name, value in state[tensor].items()}
            for piece, tensor in self._pieces
            if tensor in state
        }
        blob = pickle.dumps(mine)
        blobs: Sequence[bytes | bytearray]
        if to is None:
            blobs = group.exchange(blob)
        else:
            sizes = [int(size) for size in group.exchange(b"%d" % len(blob))]
            blobs = [bytearray(size) for size in sizes] if to == group.rank else []
            group.gather(blobs, blob, to)
        whole = {i: s for each in blobs for i, s in pickle.loads(each).items() if s}
        return dict(sorted(whole.items()))

    def _kinds(self, state: Mapping[Tensor, State]) -> dict[int, State]:
        """By parameter: dtypes of what each element has, values of what all elements share."""
        mine: dict[int, State] = {}
        for piece, tensor in self._pieces:
            for name, value in state.get(tensor, {}).items():
                kind = value.dtype if _of_each_element(name, value, tensor) else value
                mine.setdefault(piece.slot.parameter, {})[name] = kind
        merged: dict[int, State] = {}
        for blob in self.group.exchange(pickle.dumps(mine)):
            merged |= pickle.loads(blob)
        return merged

    def _gather_bucket(
        self,
        index: int,
        name: str,
        dtype: torch.dtype,
        state: Mapping[Tensor, State],
        to: int | None,
    ) -> Tensor:
        """One state of all of a bucket's elements; of this rank's shard, on ranks that get none."""
        bucket, group = self._layout.buckets[index], self.group
        start, stop = bucket.shard(group.rank)
        mine = torch.zeros(stop - start, dtype=dtype)
        for piece, tensor in self._pieces:
            if piece.bucket == index and name in state.get(tensor, {}):
                mine[piece.start - start : piece.stop - start] = state[tensor][name]
        if to not in (None, group.rank):
            group.gather(None, mine.view(torch.uint8), to)
            return mine
        elements = torch.empty(bucket.numel, dtype=dtype)
        if to is None:
            group.all_gather(elements.view(torch.uint8), mine.view(torch.uint8))
        else:
            parts = elements.view(torch.uint8).chunk(group.world_size)
            group.gather(parts, mine.view(torch.uint8), to)
        return elements


def _of_each_element(name: str, value: Any, tensor: Tensor) -> bool:
    """Whether a state has a value for each element of a parameter, not one for all."""
    return isinstance(value, Tensor) and name not in OF_ALL and value.shape == tensor.shape


def _as_loaded(name: str, value: Any, parameter: Tensor) -> Any:
    """A state of the parameter's type, as plain optimizers load it."""
    if not isinstance(value, Tensor) or name == "step" or not parameter.is_floating_point():
        return value
    return value.to(parameter.dtype)


def _alone(value: Any) -> Any:
    """A state's value without other memory that its tensor views, which would be sent, too."""
    if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
        return value.clone()
    return value


def _copied(value: Any) -> Any:
    """A state's value that does not change with the original, as a number of steps does."""
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _flat(value: Tensor, parameter: Tensor) -> Tensor:
    """A state's elements in the order of the parameter's memory."""
    copy = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    copy.copy_(value)
    return copy.as_strided((copy.numel(),), (1,))
