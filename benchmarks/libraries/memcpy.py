"""A reference: what it costs this machine when every rank copies as many bytes at the same time."""

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
        """Two buffers, both written, so that no page is missing."""
        self.source = np.ones(count, storage(dtype))
        self.target = np.ones(count, storage(dtype))

    def view(self) -> NDArray:
        """What is copied."""
        return self.source

    def operation(self, name: str) -> Callable[[], object]:
        """A copy stands beside all_reduce."""
        if name != "all_reduce":
            raise UnsupportedError(f"memcpy: no {name}")
        return partial(np.copyto, self.target, self.source)

    def path(self) -> str:
        """Nothing to say."""
        return ""

    def close(self) -> None:
        """Nothing to leave."""
