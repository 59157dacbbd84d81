"""Jobs of one, two or three ranks on the same three processes.

To start a process with TensorFlow or JAX takes longer than most cases, so there are no more of them
than the largest job needs. The process after a job's ranks can do the job alone, at the same time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tests.ranks import RankPool

PROCESSES = 3


@dataclass
class FirstRanks:
    """The first n processes of a pool."""

    pool: RankPool
    n: int

    def run(self, source: str, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Run a module's `main(rank, world, *args)` on n ranks; their results in rank order."""
        return self._run(self.n, source, args, timeout_s)

    def run_beside_one(self, source: str, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """The same, and behind the ranks' results that of one process alone."""
        return self._run(self.n + 1, source, args, timeout_s)

    def _run(self, busy: int, source: str, args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        assert busy <= self.pool.n
        main = "from tests.keras.first_ranks import part as main"
        results = self.pool.run(main, self.n, busy, source, args, timeout_s=timeout_s)
        return results[:busy]


def part(rank: int, world: int, n: int, busy: int, source: str, args: tuple[Any, ...]) -> Any:
    """In a process of the pool: its part of a job of n ranks."""
    if rank >= busy:
        return None
    os.environ.update(WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
    namespace: dict[str, Any] = {"__name__": "rank_source"}
    exec(compile(source, "<rank source>", "exec"), namespace)
    return namespace["main"](*((rank, n) if rank < n else (0, 1)), *args)
