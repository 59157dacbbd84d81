"""What the core needs to know of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Parameters(Protocol):
    """The parameters of a model on this rank, in fragments that are exchanged in turn.

    Attributes:
        counts: Number of values of each fragment.
    """

    counts: Sequence[int]

    def read(self, fragment: int, values: Floats) -> None:
        """Write the values of a fragment, as float32, to `values`."""

    def gap(self, fragment: int, anchor: Floats, gap: Floats) -> None:
        """Write how far the values of a fragment are behind the anchor, `anchor - x`, to `gap`."""

    def write(self, fragment: int, values: Floats, keep: float) -> None:
        """Make each value x of a fragment `keep * x + (1 - keep) * values`."""
