"""Compares the ranks' results of a case with the result of one process.

Ranks sum a batch's rows in another order than one process does. Keras computes parts of a float64
model in float32, where one process differs from itself by 1e-7 if rows come in another order. The
bound is 1e-5 of a variable's movement (a weight's change from its initial value): it is above all
rounding, and far below an error. A row too many or too few, or a divisor or clipping norm of one
rank's part, is 1e-3 and more. In float32 a weight of size 1 is itself rounded by 6e-8 in every
step, which is 6e-5 of a movement of 1e-3; the bound there is 2e-3. Mixed precision has 16 bits in
every gradient and shows only gross errors.

A correct result may exceed the bound because training amplifies rounding, for example in an
optimizer that divides by a gradient which is zero except for rounding. `run.py` then repeats the
case in one process with each batch's rows in reverse order, in another precision, and from initial
weights of other rounding: a difference must be larger than what these change. A loss scale of
float16 is no evidence either: the mean over a rank's fewer rows has larger gradients, which
overflow at lower scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

TOLERANCE = {"float64": 1e-5, "float32": 2e-3, "mixed_float16": 0.1, "mixed_bfloat16": 0.2}
"""Bound relative to a variable's movement, or to a number's size."""
ROUNDING = {"float64": 3e-8, "float32": 2e-6, "mixed_float16": 3e-3, "mixed_bfloat16": 2e-2}
"""Minimum bound for a number of size 1. A gradient may differ from zero by rounding alone."""
PARTS = ("weights", "state", "optimizer", "history", "batches", "evaluation", "prediction")


@dataclass(frozen=True)
class Difference:
    """A difference between two results.

    Attributes:
        where: Part and name.
        size: The maximum difference.
        bound: The permitted difference.
        scale: Size of the numbers: a weight's movement.
    """

    where: str
    size: float
    bound: float
    scale: float

    def __str__(self) -> str:
        return (
            f"{self.where} differs by {self.size:.2g}; of {self.scale:.2g}, bound {self.bound:.2g}"
        )


def differences(result: Any, reference: Any, dtype: str) -> list[Difference]:
    """Return where a result is too far from the reference, largest difference first."""
    found = [d for d in all_differences(result, reference, dtype) if not d.size <= d.bound]
    return sorted(found, key=lambda d: d.bound / d.size if d.size == d.size else -1)


def all_differences(result: Any, reference: Any, dtype: str) -> Iterator[Difference]:
    """Yield the differences of all arrays that both results have."""
    start = reference["start"]
    for part in PARTS:
        if part not in result or part not in reference:
            continue
        one, other = dict(leaves(result[part])), dict(leaves(reference[part]))
        if list(one) != list(other):
            yield Difference(f"{part}: {sorted({*one} ^ {*other})[:3]}", np.inf, 0.0, 0.0)
        for name in one.keys() & other.keys():
            before = start.get(name) if part == "weights" else None
            yield _difference(f"{part}: {name}", one[name], other[name], before, dtype)


def _difference(where: str, a: Any, b: Any, before: Any, dtype: str) -> Difference:
    if a.shape != b.shape:
        return Difference(f"{where}, shapes {a.shape} and {b.shape},", np.inf, 0.0, 0.0)
    if a.size == 0:
        return Difference(where, 0.0, 0.0, 0.0)
    largest = float(np.abs(b).max())
    scale = largest if before is None else float(np.abs(b - before).max())
    with np.errstate(invalid="ignore"):  # masks contain infinities
        size = float(np.abs(np.where(a == b, 0.0, a - b)).max())
    bound = TOLERANCE[dtype] * scale + ROUNDING[dtype] * (1 + largest)
    return Difference(where, size, bound, scale)


def leaves(part: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and arrays of a part of a result."""
    if isinstance(part, Mapping):
        for name, value in part.items():
            yield from leaves(value, f"{prefix}{name}" if not prefix else f"{prefix} {name}")
    elif isinstance(part, list):
        for place, value in enumerate(part):
            yield from leaves(value, f"{prefix}[{place}]")
    else:
        yield prefix, np.asarray(part)


def unequal_ranks(results: list[Any]) -> list[Difference]:
    """Return where the ranks' bits differ."""
    found = []
    for rank, result in enumerate(results[1:], 1):
        for part in PARTS:
            if part not in result:
                continue
            first = dict(leaves(results[0][part]))
            for name, array in leaves(result[part]):
                if name not in first or not np.array_equal(array, first[name], equal_nan=True):
                    size = np.abs(array - first[name]).max() if name in first else np.inf
                    where = f"rank {rank} has other {part} than rank 0: {name}"
                    found.append(Difference(where, float(size), 0.0, 0.0))
    return found


def is_finite(result: Any) -> bool:
    """Return whether no number is NaN or infinite; states and predictions may be infinite."""
    for part in PARTS:
        may_be_infinite = part in ("state", "prediction")
        for _, array in leaves(result.get(part, {})):
            if np.isnan(array).any() or (np.isinf(array).any() and not may_be_infinite):
                return False
    return True
