"""A reference: the time for every rank to copy as many bytes at the same time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.libraries.base import Place, UnsupportedError
from benchmarks.values import storage


class Memcpy:
    """Copies a private buffer to another private buffer."""

    reduces = False

    def __init__(self, place: Place) -> None:
        self.version = f"NumPy {np.__version__}"
        self.source = self.target = np.empty(0)

    def allocate(self, count: int, dtype: str) -> None:
        """Allocate two buffers, and write both so that no page is missing."""
        self.source = np.ones(count, storage(dtype))
        self.target = np.ones(count, storage(dtype))

    def view(self) -> NDArray:
        """Return the source buffer."""
        return self.source

    def operation(self, name: str) -> Callable[[], object]:
        """Return a copy in place of all_reduce."""
        if name != "all_reduce":
            raise UnsupportedError(f"memcpy: no {name}")
        return partial(np.copyto, self.target, self.source)

    def path(self) -> str:
        """Return an empty path."""
        return ""

    def close(self) -> None:
        """Do nothing: there is no group."""
