"""In a rank: times one operation of one library."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks import values
from benchmarks.libraries.base import Library, Place, UnsupportedError
from sdp_plugins.doctor.timing import timed

WARM_UP = 2  # untimed calls after every refill: they absorb the skew between ranks
PREPARING_CALLS = 5


class CollectiveTask:
    """The commands that `runner` gives to the ranks of a library."""

    def __init__(
        self, place: Place, target: str, options: dict[str, Any], rounding: float = 0.0
    ) -> None:
        module, name = target.split(":")
        self.place = place
        self.library: Library = getattr(importlib.import_module(module), name)(place, **options)
        self.rounding = rounding
        self.operation = ""
        self.dtype = "float32"

    def version(self) -> str:
        """Return the library's version."""
        return self.library.version

    def prepare(self, operation: str, dtype: str, count: int) -> dict[str, Any]:
        """Allocate a buffer, check one result against its closed form, and warm up.

        Returns:
            `seconds` per call, or `unsupported` with the reason why the library cannot run it.
        """
        self.operation, self.dtype = operation, dtype
        try:
            self.library.allocate(count, dtype)
            call = self.library.operation(operation)
        except UnsupportedError as reason:
            return {"unsupported": str(reason)}
        self._refill()
        call()
        self._check(1, stride=1)
        self._refill()
        samples = timed(call, PREPARING_CALLS)
        return {"seconds": min(samples[1:]) / 1e9}

    def burst(self, iterations: int) -> list[int]:
        """Return the nanoseconds of each of `iterations` back-to-back calls."""
        call = self.library.operation(self.operation)
        length = values.run_length(self.dtype, self.place.ranks)
        length = max(1, (length if self._holds_sum() else iterations + WARM_UP) - WARM_UP)
        samples: list[int] = []
        while len(samples) < iterations:
            self._refill()
            for _ in range(WARM_UP):
                call()
            n = min(length, iterations - len(samples))
            samples += timed(call, n)
            self._check(WARM_UP + n, stride=61)
        return samples

    def repeat(self, times: int) -> None:
        """Make `times` untimed calls."""
        call = self.library.operation(self.operation)
        self._refill()
        for _ in range(times):
            call()

    def path(self) -> str:
        """Return the path of the last operation."""
        return self.library.path()

    def close(self) -> None:
        """Leave the group."""
        self.library.close()

    def _holds_sum(self) -> bool:
        return self.library.reduces and self.operation == "all_reduce"

    def _refill(self) -> None:
        if self._holds_sum():
            values.fill(self.library.view(), self.dtype, self.place.rank)

    def _check(self, times: int, stride: int) -> None:
        if self._holds_sum():
            rounding, ranks = times * self.rounding, self.place.ranks
            values.check(self.library.view(), self.dtype, ranks, times, stride, rounding)
