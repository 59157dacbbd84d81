"""Runs cases on persistent processes, and returns the outcome of each."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stress.keras.compare import (
    ROUNDING,
    Difference,
    all_differences,
    differences,
    is_finite,
    unequal_ranks,
)
from stress.keras.plan import Plan
from tests.keras.first_ranks import FirstRanks
from tests.rank import RankFailure
from tests.ranks import RankPool

RUN = "stress.keras.job:run"  # not imported here, as it imports Keras
LIMIT_S = 1800.0  # limit of a training; a longer one counts as hung, and JAX may compile for 300 s
CASES_PER_PROCESS = 150  # frameworks keep everything that they have compiled
CHAOS = 0.1
"""Share of a difference. If one process differs from itself by more when rows are reordered, the
case is no evidence."""

ROUNDING_FACTOR = 30
"""A difference must be 30 times what row order or precision changes, or it may be rounding."""
OTHER_PRECISION = {
    "float64": "float32",  # Keras computes parts of a float64 model in float32
    "float32": "float64",
    "mixed_float16": "float32",
    "mixed_bfloat16": "float32",
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes:
        kind: `equal`, `different`, `refused` by the plug-in with a hint, `invalid` in one process,
            `unstable` in one process.
        text: The differences, or the error.
        seconds: The duration.
    """

    kind: str
    text: str
    seconds: float = 0.0


@dataclass
class Summary:
    """The outcomes of many cases."""

    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        self.kinds[outcome.kind] += 1
        self.seconds += outcome.seconds
        if outcome.kind in ("refused", "invalid", "unstable"):
            self.reasons[f"{outcome.kind}: {nameless(outcome.text)}"] += 1

    def __str__(self) -> str:
        total = sum(self.kinds.values())
        counts = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        return f"{total} models: {counts}; {self.seconds / max(total, 1):.1f} s each"


def nameless(text: str) -> str:
    """Return an error's first line without the parts that differ in every case."""
    return re.sub(r"['\"\[(].*?['\")\]]|\d+", "...", text.partition("\n")[0])[:110]


class Runner:
    """Three persistent processes with Keras on a backend."""

    def __init__(self, pool: RankPool, spoil: str = "") -> None:
        self._pool = pool
        self._spoil = spoil
        self._cases = 0

    def run(self, plan: Plan) -> Outcome:
        """Run a case in one process and on several ranks."""
        began = time.monotonic()
        self._cases += 1
        if self._cases % CASES_PER_PROCESS == 0:
            self.close()
        kind, text = self._compared(plan)
        return Outcome(kind, text, time.monotonic() - began)

    def close(self) -> None:
        """End the processes."""
        if self._pool.ranks is not None:
            self._pool.ranks.close()
            self._pool.ranks = None

    def _compared(self, plan: Plan) -> tuple[str, str]:
        try:
            (alone,) = self._on(plan, 1)
            if "error" in alone:
                return "invalid", alone["error"]
            if not is_finite(alone):
                return "invalid", "not finite"
            ranks = self._on(plan, plan.world, False, self._spoil)
        except RankFailure as error:
            return "different", f"a process was lost or hangs\n{error}"
        if errors := [rank for rank in ranks if "error" in rank]:
            if len(errors) == len(ranks) and all(rank["refused"] for rank in errors):
                return "refused", ranks[0]["error"]
            if reason := self._error_of_small_batches(plan):
                return "invalid", reason
            return "different", "\n".join(
                f"rank {place}: {rank.get('traceback', 'no error')}"
                for place, rank in enumerate(ranks)
            )
        if plan.dtype.startswith("mixed") and not all(map(is_finite, ranks)):
            return "unstable", f"not finite in {plan.dtype}"
        if found := unequal_ranks(ranks):
            return "different", told(found)
        if not (found := differences(ranks[0], alone, plan.dtype)):
            return "equal", ""
        (again,) = self._on(plan, 1, True)
        by_itself = {d.where: d.size for d in differences(again, alone, plan.dtype)}
        if by_itself and max(by_itself.values()) > CHAOS * found[0].size:
            return "unstable", f"{plan.dtype}, {plan.optimizer['name']}"
        if any(d.where.endswith(("dynamic_scale", "step_counter")) for d in found):
            return "unstable", "the loss scale was lowered in other steps"
        if self._is_rounding(plan, found, alone, again):
            return "unstable", f"rounding of {plan.dtype}, {plan.optimizer['name']}"
        return "different", told(found)

    def _error_of_small_batches(self, plan: Plan) -> str | None:
        """Return the error of one process with batches of a rank's size.

        Keras accepts some losses with a mask or weights only if the batch has as many rows as
        there are classes.
        """
        batch = plan.fit["batch_size"]
        for rows in {-(-batch // plan.world), max(batch // plan.world, 1)}:
            small = replace(plan, fit={**plan.fit, "batch_size": rows})
            (alone,) = self._on(small, 1)
            if "error" in alone:
                return f"with {rows} rows per batch: {alone['error']}"
        return None

    def _is_rounding(self, plan: Plan, found: list[Difference], alone: Any, again: Any) -> bool:
        """Return whether one process's values change by a similar size.

        Row order, precision, or rounding of the initial weights changes them. The last one breaks
        ties, as of a maximum, which one process may keep and ranks do not.
        """
        other_plan = replace(plan, dtype=OTHER_PRECISION[plan.dtype])
        (other,) = self._on(other_plan, 1, False, "", alone["start"])
        (moved,) = self._on(plan, 1, False, "", rounded(alone["start"], plan))
        sizes: dict[str, float] = defaultdict(float)
        for result in (again, other, moved):
            for d in all_differences(result, alone, plan.dtype) if "error" not in result else ():
                sizes[d.where] = max(sizes[d.where], d.size)
        return all(d.size <= ROUNDING_FACTOR * sizes[d.where] for d in found)

    def _on(self, plan: Plan, world: int, *args: Any) -> list[Any]:
        ranks = FirstRanks(self._pool, world)
        results = ranks.run(RUN, plan.to_json(), *args, timeout_s=LIMIT_S)
        return results[:world]


def rounded(start: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Return weights that differ by less than a bound, and by more than rounding."""
    draw = np.random.default_rng(plan.seed)
    size = ROUNDING[plan.dtype] / 100
    return {
        name: value + size * (1 + np.abs(value)) * draw.uniform(-1, 1, value.shape)
        for name, value in start.items()
    }


def told(found: list[Difference], most: int = 4) -> str:
    """Return the largest differences, one per line."""
    more = [f"and {len(found) - most} more"] if len(found) > most else []
    return "\n".join([*map(str, found[:most]), *more])


def still_differs(runner: Runner) -> Callable[[Plan], bool]:
    """Return a function that tells whether a plan still has to be reported."""
    return lambda plan: runner.run(plan).kind == "different"
