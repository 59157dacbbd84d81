"""The rows of a global batch that belong to this rank, and their weight.

A global batch of N rows is cut into contiguous parts whose sizes differ by at most one row. If
there are more ranks than rows, a rank without a row computes on one of the batch with weight zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from . import keras_internals

DATA, WHOLE, DIGEST = "sdp_data", "sdp_whole", "sdp_digest"
"""Keys of a cut batch. They hold this rank's data; an empty array with a row for each row of the
global batch, because compiled code knows shapes on all backends, statically on JAX; and a hash of
the global batch if it is yet to be compared with the other ranks'."""

OTHER_BATCHES = (
    "{} reads other batches. Hint: of everything but arrays all ranks must read the same global "
    "batches, of which each takes its part: give shuffles a seed, or pass arrays."
)


def rows(count: Any, rank: int, world_size: int) -> tuple[Any, Any]:
    """Return a rank's first row and number of rows; ``count`` may be an integer or a tensor."""
    begin = count * rank // world_size
    return begin, count * (rank + 1) // world_size - begin


def rows_to_read(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return a rank's first row and number of rows, but at least one row."""
    begin, length = rows(count, rank, world_size)
    return min(begin, count - 1), max(length, 1)


@dataclass(frozen=True)
class BatchShard:
    """This rank's part of the batch of a step.

    Attributes:
        count: Rows of the global batch.
        begin: The index of this rank's first row.
        rows: Number of this rank's rows; may be 0.
        world_size: Number of ranks.
        batch: The data of this rank's rows.

    Numbers are Python integers if the shape is known when the step is traced, else tensors.
    """

    count: Any
    begin: Any
    rows: Any
    world_size: int
    batch: Any = None

    @classmethod
    def of(cls, batch: Any, count: Any, rank: int, world_size: int) -> BatchShard:
        """Return the shard of a rank."""
        return cls(count, *rows(count, rank, world_size), world_size, batch)

    @property
    def is_static(self) -> bool:
        """Whether the numbers are Python integers."""
        return isinstance(self.count, int)

    @property
    def is_even(self) -> bool:
        """Whether all ranks are known to have the same number of rows."""
        return self.is_static and self.count % self.world_size == 0

    @property
    def weight(self) -> Any:
        """This rank's share of all rows, from 0 to 1."""
        if self.is_static:
            return self.rows / self.count
        return _quotient(self.rows, self.count)

    @property
    def factor(self) -> Any:
        """The weight of this rank's mean in a mean over ranks; 1 for even shards."""
        if self.is_static:
            return self.rows * self.world_size / self.count
        return _quotient(self.rows * self.world_size, self.count)

    def times(self, tensor: Any, number: Any) -> Any:
        """Multiply; return zeros on a rank without rows, even if the tensor has NaNs."""
        if self.is_static:
            return tensor * ops.cast(number, tensor.dtype) if self.rows else ops.zeros_like(tensor)
        return ops.where(
            self.rows > 0, tensor * ops.cast(number, tensor.dtype), ops.zeros_like(tensor)
        )


def _quotient(a: Any, b: Any) -> Any:
    """Divide integer tensors as Python does: layers may compute in more bits than the default."""
    return ops.cast(a, "float64") / ops.cast(b, "float64")


def factor_of(shard: BatchShard | None) -> Any:
    """Return the weight of this rank's gradients; 1 outside a step on a batch."""
    return 1.0 if shard is None else shard.factor


def cut(data: Any, begin: Any, length: Any) -> Any:
    """Return rows of every tensor of a structure."""
    return keras_internals.map_leaves(lambda leaf: leaf[begin : begin + length], data)


def mark(data: Any, whole: Any) -> dict[str, Any]:
    """Attach the global batch's size to this rank's data."""
    return {DATA: data, WHOLE: whole}


def is_marked(data: Any) -> bool:
    """Return whether data has already been cut."""
    return isinstance(data, dict) and WHOLE in data


def first_leaf(data: Any) -> Any:
    """Return a tensor of a batch; all have the same number of rows."""
    return next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
