"""Predictions for whole batches, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from sdp_plugins.core.tensor_lists import to_move

from .batch_shard import rows, rows_to_read

if TYPE_CHECKING:
    from sdp_plugins.core import Group

    from .context import TrainingContext

_MARK = "_smddp"


def of_all_ranks(function: Callable[..., Any], context: TrainingContext) -> Callable[..., Any]:
    """Make a predict function, whose steps return their batches' sizes, return all rows."""
    if hasattr(function, _MARK):
        return function
    backend, group = context.backend, context.group

    def whole(local: Any) -> Any:
        outputs, counts = local
        sizes = [int(count) for count in backend.to_numpy(counts)]
        return keras.tree.map_structure(
            lambda leaf: backend.from_numpy(gather_rows(group, backend.to_numpy(leaf), sizes)),
            outputs,
        )

    def predict(*args: Any) -> Any:
        result = function(*args)
        if backend.is_stateless:
            local, state = result
            return whole(local), state
        return whole(result)

    setattr(predict, _MARK, True)
    return predict


def gather_rows(
    group: Group, local: np.ndarray[Any, Any], sizes: list[int]
) -> np.ndarray[Any, Any]:
    """Return the ranks' rows of consecutive global batches of these sizes in order.

    This rank's include rows that it has computed for lack of its own.
    """
    world = group.world_size
    lengths = [[rows(size, rank, world)[1] for size in sizes] for rank in range(world)]
    read = [rows_to_read(size, group.rank, world)[1] for size in sizes]
    batches = zip(_split(local, read), lengths[group.rank], strict=True)
    mine = np.ascontiguousarray(np.concatenate([batch[:length] for batch, length in batches]))
    parts = [np.empty((sum(each), *local.shape[1:]), local.dtype) for each in lengths]
    group.all_gather_uneven([to_move(part) for part in parts], to_move(mine))
    of_ranks = [_split(part, each) for part, each in zip(parts, lengths, strict=True)]
    return np.concatenate([part for batch in zip(*of_ranks, strict=True) for part in batch])


def _split(array: np.ndarray[Any, Any], lengths: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    return np.split(array, np.cumsum(lengths)[:-1])
