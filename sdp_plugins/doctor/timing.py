"""Times calls; the benchmarks do it by the same function."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def timed(call: Callable[[], object], iterations: int) -> list[int]:
    """Return the nanoseconds of each call, with the garbage collector paused."""
    clock = time.perf_counter_ns
    samples = [0] * iterations
    collecting = gc.isenabled()
    gc.disable()
    try:
        for i in range(iterations):
            start = clock()
            call()
            samples[i] = clock() - start
    finally:
        if collecting:
            gc.enable()
    return samples
