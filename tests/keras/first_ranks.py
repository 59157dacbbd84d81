"""Jobs of one, two or three ranks on the same three processes.

To start a process with TensorFlow or JAX takes longer than most cases, so there are no more of them
than the largest job needs. The process after a job's ranks can do the job alone, at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.ranks import RankPool

PROCESSES = 3
LIMIT_S = 280.0  # of a job: below the time that a test has


@dataclass
class FirstRanks:
    """The first n processes of a pool; and what a job's environment has besides."""

    pool: RankPool
    n: int
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, source: str, *args: Any, timeout_s: float = LIMIT_S) -> list[Any]:
        """Run a module's `main(rank, world, *args)` on n ranks; their results in rank order."""
        return self._run(self.n, source, args, timeout_s)

    def run_beside_one(self, source: str, *args: Any, timeout_s: float = LIMIT_S) -> list[Any]:
        """The same, and behind the ranks' results that of one process alone."""
        return self._run(self.n + 1, source, args, timeout_s)

    def _run(self, busy: int, source: str, args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        assert busy <= self.pool.n
        main = "from tests.keras.first_ranks import part as main"
        env = {**self.environment, "WORLD_SIZE": str(self.n), "LOCAL_WORLD_SIZE": str(self.n)}
        results = self.pool.run(main, self.n, busy, env, source, args, timeout_s=timeout_s)
        return results[:busy]


def part(
    rank: int,
    world: int,
    n: int,
    busy: int,
    environment: dict[str, str],
    source: str,
    args: tuple[Any, ...],
) -> Any:
    """In a process of the pool: its part of a job of n ranks."""
    if rank >= busy:
        return None
    namespace: dict[str, Any] = {"__name__": "rank_source"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        exec(compile(source, "<rank source>", "exec"), namespace)
        return namespace["main"](*((rank, n) if rank < n else (0, 1)), *args)
