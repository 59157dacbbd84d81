"""Checks of what others have written: a terminal, and arithmetic, are to survive it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_CHARS = 200
MOST_RANKS = 1 << 20


def printable(text: str, most: int) -> str:
    """A text for one line of a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:most])


def checked(name: str, kind: type, value: Any) -> Any:
    """A value that is of a kind.

    Args:
        name: What it is.
        kind: Of which it has to be, and of no derived one: a bool is no number.
        value: What was found.

    Raises:
        ValueError: It is not.
    """
    if type(value) is not kind:
        raise ValueError(f"it says {name}={value!r:.40}")
    return printable(value, 2 * MOST_CHARS) if isinstance(value, str) else value


def runs(members: Sequence[int]) -> list[list[int]]:
    """Ranks as stretches, each its first rank and how many follow each other."""
    found: list[list[int]] = []
    for rank in members:
        if found and rank == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([rank, 1])
    return found


def from_runs(found: Any, world_size: int) -> tuple[int, ...] | None:
    """The ranks that `runs` has written; None if it cannot have been."""
    if not isinstance(found, list):
        return None
    members: list[int] = []
    for run in found:
        if not (isinstance(run, list) and len(run) == 2 and all(type(n) is int for n in run)):
            return None
        first, count = run
        if not 0 <= first < MOST_RANKS or not 0 < count <= world_size - len(members):
            return None
        members += range(first, first + count)
    return tuple(members) if len(members) == world_size else None
