"""What the core needs to know of a model."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Parameters(Protocol):
    """The parameters of a model on this rank, in fragments that are exchanged in turn.

    Attributes:
        counts: Number of values of each fragment.
        described: Every tensor of the model, as users know it; the same on all ranks.
    """

    counts: Sequence[int]
    described: Sequence[str]

    def read(self, fragment: int, values: Floats) -> None:
        """Write the values of a fragment, as float32, to `values`."""

    def gap(self, fragment: int, anchor: Floats, gap: Floats) -> None:
        """Write how far the values of a fragment are behind the anchor, `anchor - x`, to `gap`."""

    def rounded(self, fragment: int, values: Floats) -> Floats | None:
        """`values` as the parameters of a fragment hold them; None: exactly.

        Called in another thread while the model is trained.
        """

    def write(self, fragment: int, values: Floats) -> None:
        """Make `values` those of a fragment."""

    def add(self, fragment: int, changes: Floats) -> None:
        """Add `changes` to the values of a fragment."""


def describe(name: str, shape: Iterable[int], dtype: object, is_trained: bool = True) -> str:
    """A tensor of a model, for `Parameters.described`."""
    return f"{name}: {tuple(shape)}, {dtype}{'' if is_trained else ', frozen'}"


def divide(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Divide a sequence of arrays into fragments of about equal size, none of them empty.

    Arrays of the same size take turns, so that each fragment has some of every layer: ranks learn
    faster than with fragments of whole layers (the strided pattern of Douillard et al., 2025).

    Returns:
        The indices of each fragment's arrays.

    Raises:
        ValueError: There are fewer arrays than fragments.
    """
    if not sizes:
        raise ValueError("the model has no parameters that are trained.")
    if len(sizes) < fragments:
        raise ValueError(
            f"fragments={fragments}, but the model has {len(sizes)} parameters that are trained. "
            "Hint: make fragments at most that many."
        )
    parts: list[list[int]] = [[] for _ in range(fragments)]
    smallest_first = [(0, 0, part) for part in range(fragments)]  # values, arrays: a heap
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        values, arrays, part = smallest_first[0]
        parts[part].append(index)
        heapq.heapreplace(smallest_first, (values + sizes[index], arrays + 1, part))
    return [sorted(part) for part in parts]
