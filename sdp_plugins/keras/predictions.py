"""Predictions for whole batches, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from sdp_plugins.core.tensor_lists import as_bytes

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
    """Return the ranks' rows of consecutive batches in order.

    Args:
        group: The ranks.
        local: This rank's rows of all batches, including rows computed for lack of its own.
        sizes: Rows of each global batch.
    """
    ranks = range(group.world_size)
    lengths = [[int(rows(size, rank, group.world_size)[1]) for rank in ranks] for size in sizes]
    read = [rows_to_read(size, group.rank, group.world_size)[1] for size in sizes]
    starts = np.cumsum([0, *read])
    own = [
        local[start : start + length[group.rank]]
        for start, length in zip(starts[:-1], lengths, strict=True)
    ]
    of_rank = list(zip(*lengths, strict=True))
    parts = [np.empty((sum(each), *local.shape[1:]), local.dtype) for each in of_rank]
    mine = np.ascontiguousarray(np.concatenate(own))
    group.all_gather_uneven([as_bytes(part) for part in parts], as_bytes(mine))
    begins = [np.cumsum([0, *each]) for each in of_rank]
    return np.concatenate(
        [
            parts[rank][begins[rank][batch] : begins[rank][batch + 1]]
            for batch in range(len(sizes))
            for rank in ranks
        ]
    )
