"""Long random programs of all operations: what one leaves behind must not show in the next."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import Group, Work
from tests.core.kept_group import kept_group, registered, settings
from tests.core.values import Array
from tests.ranks import Pool

Check = Callable[[], bool]

# Just around what travels inline, one round of staging, many rounds.
COUNTS = (0, 1, 31, 4096, 4097, 20_000, 150_001)
STEPS = 250


class Program:
    """One rank's run; the choices are the same on all ranks, the delays are not."""

    def __init__(self, group: Group, seed: int) -> None:
        self.group, self.rank, self.world = group, group.rank, group.world_size
        self.same = np.random.default_rng(seed)
        self.own = np.random.default_rng((seed, group.rank))
        self.pending: list[tuple[str, Work | None, Check]] = []
        self.wrong: list[str] = []

    def run(self) -> list[str]:
        operations: list[Callable[[int, int, bool], tuple[Work | None, Check]]] = [
            self.all_reduce,
            self.all_reduce_in_place,
            self.reduce,
            self.broadcast,
            self.all_gather,
            self.reduce_scatter,
            self.all_to_all,
            self.barrier,
            self.ring,
        ]
        for step in range(STEPS):
            operation = operations[self.same.integers(len(operations))]
            count = COUNTS[self.same.integers(len(COUNTS))]
            asynchronous = bool(self.same.integers(2))
            if self.own.random() < 0.05:
                time.sleep(self.own.random() * 0.004)
            work, check = operation(step, count, asynchronous)
            self.pending.append((f"{step}: {operation.__name__}[{count}]", work, check))
            if not asynchronous or len(self.pending) > 6:
                self.settle()
        self.settle()
        return self.wrong

    def settle(self) -> None:
        for what, work, check in self.pending:
            if work is not None:
                work.wait()
            if not check():
                self.wrong.append(what)
        self.pending.clear()

    def fill(self, step: int, rank: int, count: int) -> Array:
        """Small integers, so that every order of adding is exact."""
        return ((np.arange(count) + 7 * step + rank) % 1000).astype(np.float32)

    def total(self, step: int, count: int) -> Array:
        return sum((self.fill(step, r, count) for r in range(self.world)), np.zeros(count, "f4"))

    def all_reduce(self, step: int, count: int, how: bool) -> tuple[Work | None, Check]:
        data = self.fill(step, self.rank, count)
        work = self.group.all_reduce(data, async_op=how)
        return work, lambda: np.array_equal(data, self.total(step, count))

    def all_reduce_in_place(self, step: int, count: int, how: bool) -> Any:
        self.settle()  # the registered memory is used by one at a time
        data = registered(count, "float32")
        data[:] = self.fill(step, self.rank, count)
        work = self.group.all_reduce(data, async_op=how)
        return work, lambda: np.array_equal(data, self.total(step, count))

    def reduce(self, step: int, count: int, how: bool) -> tuple[Work | None, Check]:
        root = step % self.world
        data = self.fill(step, self.rank, count)
        expected = self.total(step, count) if self.rank == root else data.copy()
        work = self.group.reduce(data, root, async_op=how)
        return work, lambda: np.array_equal(data, expected)

    def broadcast(self, step: int, count: int, how: bool) -> tuple[Work | None, Check]:
        root = step % self.world
        data = self.fill(step, self.rank, count)
        work = self.group.broadcast(data, root, async_op=how)
        return work, lambda: np.array_equal(data, self.fill(step, root, count))

    def all_gather(self, step: int, count: int, how: bool) -> tuple[Work | None, Check]:
        output = np.zeros((self.world, count), np.float32)
        work = self.group.all_gather(output, self.fill(step, self.rank, count), async_op=how)
        return work, lambda: all(
            np.array_equal(output[r], self.fill(step, r, count)) for r in range(self.world)
        )

    def reduce_scatter(self, step: int, count: int, how: bool) -> tuple[Work | None, Check]:
        output = np.zeros(count, np.float32)
        whole = self.fill(step, self.rank, count * self.world)
        work = self.group.reduce_scatter(output, whole, async_op=how)
        mine = slice(self.rank * count, (self.rank + 1) * count)
        return work, lambda: np.array_equal(output, self.total(step, count * self.world)[mine])

    def all_to_all(self, step: int, count: int, how: bool) -> tuple[Work | None, Check]:
        """Rank s gives d (s + d + step) % 3 parts."""
        to = [count * ((self.rank + d + step) % 3) for d in range(self.world)]
        output = np.zeros(sum(to), np.float32)  # as many come as go
        whole = self.fill(step, self.rank, sum(to))
        work = self.group.all_to_all(output, whole, to, to, async_op=how)

        def check() -> bool:
            parts = []
            for src in range(self.world):
                sent = [count * ((src + d + step) % 3) for d in range(self.world)]
                begin = sum(sent[: self.rank])
                parts.append(self.fill(step, src, sum(sent))[begin : begin + sent[self.rank]])
            return np.array_equal(output, np.concatenate(parts))

        return work, check

    def barrier(self, step: int, count: int, how: bool) -> tuple[Work | None, Check]:
        return self.group.barrier(async_op=how), lambda: True

    def ring(self, step: int, count: int, how: bool) -> tuple[Work | None, Check]:
        if self.world == 1:
            return None, lambda: True
        before = (self.rank - 1) % self.world
        got = np.zeros(count, np.float32)
        mine = self.fill(step, self.rank, count)
        sent = self.group.send(mine, (self.rank + 1) % self.world, step, async_op=True)
        received = self.group.recv(got, before, step, async_op=how)

        def check() -> bool:
            received.wait()
            assert sent is not None
            sent.wait()
            return np.array_equal(got, self.fill(step, before, count))

        return None, check


def run(rank: int, world: int, seed: int) -> list[str]:
    return Program(kept_group(), seed).run()


def run_with_little_staging(rank: int, world: int, seed: int) -> list[str]:
    """Many rounds in each operation."""
    with settings(SDP_STAGING_BYTES="65536"):
        group = Group.from_env(timeout_s=30)
    with group:
        program = Program(group, seed)
        # Private memory: the registered one belongs to the kept group.
        program.all_reduce_in_place = program.all_reduce  # type: ignore[method-assign]
        return program.run()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_program(rank_pool: Pool, world: int, seed: int) -> None:
    assert rank_pool(world).run(run, seed) == [[]] * world


@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_program_with_little_staging(rank_pool: Pool, world: int) -> None:
    assert rank_pool(world).run(run_with_little_staging, world) == [[]] * world
