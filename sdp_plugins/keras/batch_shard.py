"""Which rows of a global batch are this rank's, and how much they count.

A global batch of N rows is cut into contiguous parts that differ by one row at most. Where ranks
outnumber rows, a rank without any computes on one of them, and that counts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from . import keras_internals

DATA, WHOLE, DIGEST = "sdp_data", "sdp_whole", "sdp_digest"
"""Keys of a batch that was cut: this rank's data; an empty array with a row for each of the global
batch, because a shape is what is known to compiled code on all backends, statically on JAX; and, if
that is still to be compared with other ranks', a number made of the global batch."""

OTHER_BATCHES = (
    "{} reads other batches. Hint: of everything but arrays all ranks must read the same global "
    "batches, of which each takes its part: give shuffles a seed, or pass arrays."
)


def rows(count: Any, rank: int, world_size: int) -> tuple[Any, Any]:
    """First row and number of rows of a rank; ``count`` may be an integer or a tensor."""
    begin = count * rank // world_size
    return begin, count * (rank + 1) // world_size - begin


def rows_to_read(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """As ``rows``, but at least one."""
    begin, length = rows(count, rank, world_size)
    return min(begin, count - 1), max(length, 1)


@dataclass(frozen=True)
class BatchShard:
    """This rank's part of the batch of a step.

    Attributes:
        count: Rows of the global batch.
        begin: The number of this rank's first row.
        rows: Number of this rank's rows; may be 0.
        world_size: Number of ranks.
        batch: The data of this rank's rows.

    Numbers are Python's where the shape is known when the step is traced, else tensors.
    """

    count: Any
    begin: Any
    rows: Any
    world_size: int
    batch: Any = None

    @classmethod
    def of(cls, batch: Any, count: Any, rank: int, world_size: int) -> BatchShard:
        """The shard of a rank."""
        return cls(count, *rows(count, rank, world_size), world_size, batch)

    @property
    def is_static(self) -> bool:
        """Whether the numbers are Python's."""
        return isinstance(self.count, int)

    @property
    def is_even(self) -> bool:
        """Whether all ranks are known to have the same number of rows."""
        return self.is_static and self.count % self.world_size == 0

    @property
    def weight(self) -> Any:
        """The part of all rows, from 0 to 1."""
        if self.is_static:
            return self.rows / self.count
        return _quotient(self.rows, self.count)

    @property
    def factor(self) -> Any:
        """What a mean over this rank's rows counts in a mean over ranks; 1 if shards are even."""
        if self.is_static:
            return self.rows * self.world_size / self.count
        return _quotient(self.rows * self.world_size, self.count)

    def times(self, tensor: Any, number: Any) -> Any:
        """Multiply; nothing is left of a rank without rows, whatever it has computed."""
        if self.is_static:
            return tensor * ops.cast(number, tensor.dtype) if self.rows else ops.zeros_like(tensor)
        return ops.where(
            self.rows > 0, tensor * ops.cast(number, tensor.dtype), ops.zeros_like(tensor)
        )


def _quotient(a: Any, b: Any) -> Any:
    """Of tensors of integers: as exact as the program's numbers, and never of 16 bits."""
    dtype = keras.backend.result_type(keras.backend.floatx(), "float32")
    return ops.cast(a, dtype) / ops.cast(b, dtype)


def factor_of(shard: BatchShard | None) -> Any:
    """What this rank's gradients count, also where no step of a batch is under way."""
    return 1.0 if shard is None else shard.factor


def cut(data: Any, begin: Any, length: Any) -> Any:
    """Rows of every tensor of a structure."""
    return keras_internals.map_leaves(lambda leaf: leaf[begin : begin + length], data)


def mark(data: Any, whole: Any) -> dict[str, Any]:
    """Say of which batch this rank's data is a part."""
    return {DATA: data, WHOLE: whole}


def is_marked(data: Any) -> bool:
    """Whether data was cut already."""
    return isinstance(data, dict) and WHOLE in data


def first_leaf(data: Any) -> Any:
    """A tensor of a batch; all have as many rows."""
    return next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
