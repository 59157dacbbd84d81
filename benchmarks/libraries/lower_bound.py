"""A reference: the best in-place all_reduce that NumPy can do when all ranks share all buffers.

Every rank's buffer is in one mapping that all ranks share. Each rank sums its part of all buffers
and writes the sum into all of them, between two barriers that spin on shared counters. A rank
processes its part in pieces that stay in the core's cache between the sum and the copies.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.libraries.base import Place, UnsupportedError
from benchmarks.values import storage

LINE = 64  # bytes; each counter has its own cache line
PIECES = (2**17, 2**18, 2**20)  # bytes; the caches decide which is fastest
TRIES = 6
PATIENCE = 20_000  # spins before a rank yields the core


class LowerBound:
    """All ranks' buffers and counters in one shared mapping."""

    reduces = True

    def __init__(self, place: Place) -> None:
        self.place = place
        self.version = f"NumPy {np.__version__}"
        self.counters = np.zeros((place.ranks, LINE // 8), np.uint64)
        self.buffers: list[NDArray] = []
        self.pieces: list[list[NDArray]] = []
        self.turn = 0
        crowded = place.ranks > len(os.sched_getaffinity(0))
        self.patience = 0 if crowded else PATIENCE

    def allocate(self, count: int, dtype: str) -> None:
        """Map counters and buffers, touch this rank's buffer, and find the best piece size."""
        if dtype in ("float16", "bfloat16"):
            raise UnsupportedError("NumPy has no fast 16-bit floats")
        self._map(count, storage(dtype))
        self.view()[:] = 1
        timings = [(self._try(nbytes), nbytes) for _ in range(TRIES) for nbytes in PIECES]
        self._cut(self._agree(min(timings)[1]))

    def view(self) -> NDArray:
        """Return this rank's buffer."""
        return self.buffers[self.place.rank]

    def operation(self, name: str) -> Callable[[], object]:
        """Return the sum, or the barrier alone."""
        if name not in ("all_reduce", "barrier"):
            raise UnsupportedError(f"lower_bound: no {name}")
        return self._all_reduce if name == "all_reduce" else self._barrier

    def path(self) -> str:
        """Return the fastest piece size."""
        return f"pieces of {self.pieces[0][0].nbytes // 1024} KiB" if self.pieces else ""

    def close(self) -> None:
        """Do nothing: the mapping is freed with its arrays."""
        self.buffers, self.pieces = [], []

    def _map(self, count: int, dtype: np.dtype) -> None:
        ranks, stride = self.place.ranks, -(-count * dtype.itemsize // 4096) * 4096
        self.close()
        head = 4096 + ranks * LINE // 4096 * 4096
        os.ftruncate(self.place.shared_fd, head + ranks * stride)
        memory = mmap.mmap(self.place.shared_fd, head + ranks * stride)
        self.counters = np.frombuffer(memory, np.uint64, ranks * LINE // 8).reshape(ranks, -1)
        starts = range(head, head + ranks * stride, stride)
        self.buffers = [np.frombuffer(memory, dtype, count, start) for start in starts]
        self.turn = int(self.counters[self.place.rank, 0])  # counters outlive the previous buffers

    def _cut(self, nbytes: int) -> None:
        size = self.buffers[0].size
        begin, end = (size * r // self.place.ranks for r in (self.place.rank, self.place.rank + 1))
        step = max(1, nbytes // self.buffers[0].itemsize)
        # this rank's own buffer first: its part is the most likely to be in this core's cache
        mine_first = np.roll(np.arange(self.place.ranks), -self.place.rank)
        self.pieces = [
            [self.buffers[r][i : min(i + step, end)] for r in mine_first]
            for i in range(begin, end, step)
        ]

    def _try(self, nbytes: int) -> float:
        self._cut(nbytes)
        start = time.perf_counter()
        self._all_reduce()
        return time.perf_counter() - start

    def _agree(self, nbytes: int) -> int:
        """Return rank 0's choice, passed through its line of counters."""
        if self.place.rank == 0:
            self.counters[0, 1] = nbytes
        self._barrier()
        return int(self.counters[0, 1])

    def _all_reduce(self) -> None:
        self._barrier()
        for first, *others in self.pieces:
            for other in others:
                np.add(first, other, first)
            for other in others:
                other[:] = first
        self._barrier()

    def _barrier(self) -> None:
        self.turn += 1
        self.counters[self.place.rank, 0] = self.turn
        for counter in self.counters:
            spins = 0
            while counter[0] < self.turn:
                spins += 1
                if spins > self.patience:
                    os.sched_yield()
