"""A part of a model's parameters that is exchanged as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import _native
from .outer_step import OuterStep
from .parameters import Floats

if TYPE_CHECKING:
    from ..group import Group
    from ..wire_encoding import Encoding

_ALIGN = 256  # values: no block of 8-bit values is cut


class Fragment:
    """What all ranks agree on: the anchor, from which each trains on; a shard of the momenta.

    Per value it takes 4 bytes on each rank for the anchor, and 4 on one rank for the momentum.

    Args:
        group: The ranks.
        count: Number of values.
        outer: The optimizer.
        encoding: How changes of the anchor travel; None: exactly.

    Attributes:
        anchor: The values that all ranks agree on.
        momenta: Of this rank's shard.
    """

    def __init__(
        self, group: Group, count: int, outer: OuterStep, encoding: Encoding | None
    ) -> None:
        self._group, self._outer, self._encoding = group, outer, encoding
        self._part = -(-count // (group.world_size * _ALIGN)) * _ALIGN
        self._count = count
        self._anchor = np.zeros(self._part * group.world_size, np.float32)
        self.anchor = self._anchor[:count]
        self.momenta = np.zeros(self._part, np.float32)

    @property
    def padded(self) -> int:
        """Number of values that `exchange` needs memory for."""
        return len(self._anchor)

    def exchange(self, gap: Floats, *, as_average: bool = False) -> None:
        """Move the anchor: a collective, which sends each value and each change once.

        Args:
            gap: How far this rank's values are behind the anchor; `padded` values, of which the
                last ones do not count. They are overwritten.
            as_average: Whether the anchor becomes the ranks' average, whatever the optimizer is,
                whose momenta stay as they are. Then a second exchange changes nothing.
        """
        gap[self._count :] = 0
        mine = np.empty(self._part, np.float32)
        self._group.reduce_scatter(mine, gap, "avg")
        if as_average:
            np.negative(mine, out=mine)
        else:
            self._outer.update(mine, self.momenta)
        changes = gap
        if self._encoding is None:
            self._group.all_gather(changes, mine)
        else:
            self._gather_rounded(changes, mine, self._encoding)
        self._anchor += changes

    def _gather_rounded(self, changes: Floats, mine: Floats, encoding: Encoding) -> None:
        """Gather all ranks' changes, rounded; this rank's own too, so that all are alike."""
        nbytes, ranks = encoding.nbytes(self._part), self._group.world_size
        packed = np.empty(nbytes, np.uint8)
        encoding.pack(_native.address(packed), _native.address(mine), self._part)
        gathered = np.empty((ranks, nbytes), np.uint8)
        self._group.all_gather(gathered, packed)
        for part, rounded in zip(changes.reshape(ranks, self._part), gathered, strict=True):
            encoding.unpack(_native.address(part), _native.address(rounded), self._part)
