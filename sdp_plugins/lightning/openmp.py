"""Ends OpenMP's threads before a fork."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

HARD = 2  # omp_pause_hard


def end_openmp_threads() -> None:
    """End the threads that OpenMP keeps for this one; it starts new ones when it needs them.

    A forked child does not have them, and waits for them in its first parallel region for ever.
    Every copy of GNU's OpenMP in this process, such as torch's and scikit-learn's, has its own.
    """
    words = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    for library in {parts[-1] for parts in words if "/libgomp" in parts[-1]}:
        with suppress(OSError, AttributeError):  # it was deleted, or is older than GCC 9
            ctypes.CDLL(library).omp_pause_resource_all(HARD)
