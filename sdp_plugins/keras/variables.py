"""Operations on the variables of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import ops

from sdp_plugins.core.tensor_lists import broadcast_arrays

from . import keras_internals

if TYPE_CHECKING:
    from sdp_plugins.core import Group

_GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: multiples of it are far apart modulo 2^32


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers of a model and its submodels: attributes, and members of containers."""
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        for value in list(vars(layer).values()):
            members = value.values() if isinstance(value, dict) else value
            for member in members if isinstance(value, (dict, list, tuple)) else (value,):
                if isinstance(member, keras_internals.BaseOptimizer):
                    inner = getattr(member, "_inner_optimizers", ())  # of a MultiOptimizer
                    found |= {id(optimizer): optimizer for optimizer in (member, *inner)}
    return list(found.values())


def broadcast(group: Group, variables: Sequence[Any], root: int) -> None:
    """Copy one rank's values to all other ranks."""
    if group.world_size == 1:
        return
    arrays = [np.array(ops.convert_to_numpy(variable), order="C") for variable in variables]
    broadcast_arrays(group, arrays, root)
    if group.rank != root:
        for variable, array in zip(variables, arrays, strict=True):
            if not np.array_equal(ops.convert_to_numpy(variable), array):  # most often it is equal
                variable.assign(array)


def partial_sums(optimizer: Any) -> Sequence[Any]:
    """Return the variables in which an optimizer accumulates this rank's gradients."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(inner, "_accumulated_gradients", ())


def average_partial_sums(group: Group, optimizers: Iterable[Any]) -> None:
    """Replace each rank's accumulated gradients by their mean over the ranks.

    Each rank accumulates its own until an update uses their mean. After a `fit`, the sums are
    therefore those of all ranks, wherever they are saved or copied from.
    """
    arrays = []
    for optimizer in optimizers:
        for variable in partial_sums(optimizer):
            array = np.array(ops.convert_to_numpy(variable), order="C")
            arrays.append((variable, array))
            group.all_reduce(array, "avg")
    for variable, array in arrays:
        variable.assign(array)


def diversify(rank: int, states: Iterable[Any]) -> None:
    """Give random generators in equal states seeds of this rank, the same in every run."""
    if rank == 0:
        return
    for state in states:
        seed = np.array(ops.convert_to_numpy(state))
        info = np.iinfo(seed.dtype)
        mixed = (int(seed[0]) + rank * _GOLDEN) % (min(info.max, 2**32 - 1) + 1)
        seed[0] = mixed
        state.assign(seed)
