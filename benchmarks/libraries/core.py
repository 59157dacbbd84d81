"""The core without any framework: Group.all_reduce on NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

import sdp_plugins
from benchmarks.libraries.base import Place, UnsupportedError
from benchmarks.values import itemsize, storage
from sdp_plugins.core import Buffer, DType, Group


class Core:
    """One Group; its buffer is in memory of the group or in a plain array."""

    reduces = True

    def __init__(
        self,
        place: Place,
        *,
        registered: bool = True,
        traced: bool = False,
        recorded: bool = True,
    ) -> None:
        self.registered = registered
        self.version = f"sdp_plugins {sdp_plugins.__version__}"
        self.array = np.empty(0)
        self.dtype = "float32"
        self.group = Group.from_env(name="bench")
        found = (self.group.rank, self.group.world_size)
        if found != (place.rank, place.ranks):
            raise RuntimeError(f"Group.from_env took this for rank {found[0]} of {found[1]}")
        node = self.group.issuer.node
        node.set_recording(recorded)
        if traced:
            node.start_trace()

    def allocate(self, count: int, dtype: str) -> None:
        """Drop the previous buffer first: its memory belongs to the group."""
        self.array, self.dtype = np.empty(0), dtype
        if self.registered:
            memory = self.group.allocate(count * itemsize(dtype))
            self.array = np.frombuffer(memory, storage(dtype))
        else:
            self.array = np.zeros(count, storage(dtype))

    def view(self) -> NDArray:
        """Return the array itself."""
        return self.array

    def operation(self, name: str) -> Callable[[], object]:
        """Return the Group's method."""
        if name == "barrier":
            return self.group.barrier
        if name != "all_reduce":
            raise UnsupportedError(f"core: no {name}")
        if self.dtype != "bfloat16":
            return partial(self.group.all_reduce, self.array)
        buffer = Buffer(self.array.ctypes.data, self.array.size, DType.bfloat16, self.array)
        return partial(self.group.all_reduce, buffer)

    def path(self) -> str:
        """Return the path that the group reports."""
        return self.group.last_path

    def close(self) -> None:
        """Leave the group."""
        self.array = np.empty(0)
        self.group.close()
