"""In a rank: averages a model's gradients with several methods, all through one Group."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from benchmarks.libraries.base import Place
from sdp_plugins.core import DType, FusionBuffer, Group

ITEMSIZE = 4


class FusionTask:
    """The commands of `fusion` in its ranks.

    Args:
        place: This rank's position.
        counts: Elements of each gradient, in the order of the backward pass.
        threshold_bytes: Size of a fusion buffer.
    """

    def __init__(self, place: Place, counts: list[int], threshold_bytes: int) -> None:
        self.place = place
        self.group = Group.from_env(name="bench")
        self.gradients = [np.empty(count, np.float32) for count in counts]
        self.flat = np.frombuffer(self.group.allocate(ITEMSIZE * sum(counts)), np.float32)
        registered = [(count, DType.float32) for count in counts]
        self.fusion = FusionBuffer(
            self.group, registered, op="avg", threshold_bytes=threshold_bytes
        )
        self.ways: dict[str, Callable[[], None]] = {
            "fused": self._fused,
            "one by one": self._one_by_one,
            "one flat buffer": self._flat,
        }

    def buffers(self) -> int:
        """Return the number of operations into which the fusion buffer groups the gradients."""
        return len(self.fusion.buckets)

    def run(self, way: str, steps: int) -> list[float]:
        """Return the seconds of each step; check the average afterwards.

        Raises:
            ArithmeticError: A gradient is not the ranks' average.
        """
        arrays = [self.flat] if way == "one flat buffer" else self.gradients
        for array in arrays:
            array.fill(1 + self.place.rank)
        call, seconds = self.ways[way], []
        for _ in range(steps):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        average = (1 + self.place.ranks) / 2  # remains the same: the average of equal values
        for i, array in enumerate(arrays):
            if not np.allclose(array, average, rtol=1e-6, atol=0):
                raise ArithmeticError(f"{way}: gradient {i} is {array[0]}, expected {average}")
        return seconds

    def close(self) -> None:
        """Leave the group."""
        self.flat = np.empty(0, np.float32)
        self.group.close()

    def _fused(self) -> None:
        for i, gradient in enumerate(self.gradients):
            self.fusion.ready(i, gradient)
        self.fusion.finish()

    def _one_by_one(self) -> None:
        for gradient in self.gradients:
            self.group.all_reduce(gradient, "avg")

    def _flat(self) -> None:
        self.group.all_reduce(self.flat, "avg")
