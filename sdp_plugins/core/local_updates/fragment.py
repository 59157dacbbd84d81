"""A part of a model's parameters that is exchanged as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..wire_encoding import PIECE
from .outer_step import OuterStep
from .parameters import Floats

if TYPE_CHECKING:
    from ..group import Group
    from ..wire_encoding import Encoding

_ALIGN = 256  # values: no block of rounded ones is cut


class Fragment:
    """What all ranks agree on: the anchor, from which each trains on; a shard of the momenta.

    Per value it takes 4 bytes on each rank for the anchor, and 4 on one rank for the momentum.

    Args:
        group: The ranks.
        count: Number of values.
        encoding: How changes of the anchor travel.

    Attributes:
        anchor: The values that all ranks agree on.
        momenta: Of this rank's shard.
    """

    def __init__(self, group: Group, count: int, encoding: Encoding) -> None:
        self._group, self._encoding = group, encoding
        self._part = -(-count // (group.world_size * _ALIGN)) * _ALIGN
        self._count = count
        self._anchor = np.zeros(self._part * group.world_size, np.float32)
        self.anchor = self._anchor[:count]
        self.momenta = np.zeros(self._part, np.float32)

    @property
    def padded(self) -> int:
        """Number of values that `exchange` needs memory for."""
        return len(self._anchor)

    def exchange(self, gap: Floats, outer: OuterStep) -> None:
        """Move the anchor: a collective, which sends each value and each change once.

        Args:
            gap: How far this rank's values are behind the anchor; `padded` values, of which the
                last ones do not count. It becomes how far they are behind the new anchor.
            outer: The optimizer.
        """
        gap[self._count :] = 0
        mine = np.empty(self._part, np.float32)
        self._group.reduce_scatter(mine, gap, "avg")
        # If this step fails, those of the last one are still there.
        momenta = self.momenta.copy() if outer.momentum else self.momenta
        packed = np.empty(self._encoding.nbytes(self._part), np.uint8)
        for piece, at in self._pieces(packed):
            change = mine[piece]
            outer.update(change, momenta[piece])
            self._encoding.pack(at, _native.address(change), len(change))
        gathered = np.empty((self._group.world_size, len(packed)), np.uint8)
        self._group.all_gather(gathered, packed)
        self.momenta = momenta
        # This rank's own changes are rounded too, so that all ranks have the same.
        shape = self._group.world_size, self._part
        parts = self._anchor.reshape(shape), gap.reshape(shape), gathered
        for anchor, behind, each in zip(*parts, strict=True):
            for piece, at in self._pieces(each):
                change = mine[: len(anchor[piece])]
                self._encoding.unpack(_native.address(change), at, len(change))
                anchor[piece] += change
                behind[piece] += change

    def _pieces(self, packed: NDArray[np.uint8]) -> Iterator[tuple[slice, int]]:
        """Yield pieces of a shard, each with the address of its packed values."""
        for begin in range(0, self._part, PIECE):
            at = _native.address(packed[self._encoding.nbytes(begin) :])
            yield slice(begin, begin + PIECE), at
