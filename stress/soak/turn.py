"""The inputs and results of one operation of a soak."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stress.soak.data import ALL_DTYPES, LAYOUTS, MOST_BYTES, cut, laid_out, raw, torch_dtype
from tests.core.values import REDUCTIONS, Array, reduced

Check = Callable[[], None]


class Mismatch(AssertionError):
    """A result differs from NumPy's."""


@dataclass
class Live:
    """A process group of the soak, and the objects with the same lifetime."""

    handle: Any
    members: tuple[int, ...]
    rank: int  # of this process in it; -1 for a process outside
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass
class Started:
    """An operation that was issued.

    `work` may be None (the operation has completed), a Work, or a future. `check` runs afterwards
    and raises Mismatch.
    """

    work: Any
    check: Check
    group: Live | None = None
    title: str = ""


@dataclass
class Turn:
    """One operation on one rank.

    All ranks draw the same from `plan`, so every draw must happen on all of them; `own` belongs to
    this rank alone.
    """

    seed: int
    index: int
    live: Live
    plan: random.Random
    own: random.Random
    asynchronous: bool
    checks: list[int] = field(default_factory=list)  # checksums of results that all ranks share

    @property
    def group(self) -> Any:
        return self.live.handle

    @property
    def rank(self) -> int:
        return self.live.rank

    @property
    def world(self) -> int:
        return len(self.live.members)

    @property
    def everyone(self) -> range:
        return range(self.world)

    def count(self, itemsize: int, parts: int = 1) -> int:
        """Draw a number of elements: none, few, about where the core switches paths, or many."""
        return min(self._count(itemsize, parts), MOST_BYTES // itemsize // parts)

    def _count(self, itemsize: int, parts: int) -> int:
        way = self.plan.random()
        if way < 0.1:
            return self.plan.randrange(2)
        if way < 0.35:
            return self.plan.randrange(2, 100)
        if way < 0.65:
            edge = self.plan.choice((4096, 32 * 1024, 256 * 1024, 768 * 1024)) // itemsize
            near = self.plan.choice((edge, edge // self.world, edge * self.world))
            return max(0, near // parts + self.plan.randrange(-1, 2))
        most = MOST_BYTES // 4 if way < 0.97 else MOST_BYTES
        return int(2 ** self.plan.uniform(6, (most // parts // itemsize).bit_length() - 1))

    def dtype(self, among: tuple[str, ...] = ALL_DTYPES) -> str:
        return self.plan.choice(among)

    def reduction(self, dtype: str, also: tuple[str, ...] = ("avg",)) -> str:
        """Draw a name of values.REDUCTIONS that c10d supports; `also` adds less common ones."""
        known = ("sum", "avg", "premul_sum") if dtype.startswith("complex") else REDUCTIONS[dtype]
        return self.plan.choice(
            [op for op in known if op not in ("avg", "premul_sum") or op in also]
        )

    def layout(self) -> str:
        return self.plan.choice(LAYOUTS)

    def values(self, dtype: str, count: int, rank: int, *more: object) -> Array:
        """Return a rank's data in this operation."""
        return cut(dtype, count, self.seed, self.index, rank, *more)

    def tensor(self, dtype: str, array: Array, layout: str = "dense") -> Tensor:
        return laid_out(array, dtype, layout)

    def blank(self, dtype: str, count: int, layout: str = "dense") -> Tensor:
        """Return an output tensor with values other than the result."""
        return laid_out(cut(dtype, count, "blank", self.index), dtype, layout)

    def empty(self, dtype: str, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch_dtype(dtype))

    def reduced(self, dtype: str, op: str, inputs: list[Array]) -> Array:
        return reduced(inputs, dtype, op)

    def equal(self, tensor: Tensor, expected: Array, what: str = "result") -> None:
        """Fail unless the bits are equal."""
        if raw(tensor) != expected.tobytes():
            raise Mismatch(f"{what} of {tensor.dtype}[{tuple(tensor.shape)}] differs")

    def started(self, work: Any, check: Check) -> Started:
        return Started(work, check)
