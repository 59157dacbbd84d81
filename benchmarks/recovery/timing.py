"""How long a job needed to go on, from what its ranks have said."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from benchmarks.recovery.said import BEGAN, COMMITTED, Said


class Together(NamedTuple):
    """A step that all ranks that took part in it have committed.

    Attributes:
        at: When the last of them has.
        generation: How often all ranks had been started again.
        step: The step's number.
        pids: The ranks.
    """

    at: float
    generation: int
    step: int
    pids: frozenset[int]


class Recovery(NamedTuple):
    """What it took to go on.

    Attributes:
        seconds: From the kill to the next step that all have committed who are left, or who have
            been started again.
        lost_steps: How many steps the ranks had begun, and have not committed or taken again.
        whole_s: From the kill to the next step of as many ranks as before.
    """

    seconds: float
    lost_steps: int
    whole_s: float


def steps_together(said: Sequence[Said]) -> Iterator[Together]:
    """Yield the steps that all have committed who took part, in this order."""
    pids: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for one in said:
        if one.what == COMMITTED:
            key = (one.generation, one.step, one.world)
            pids[key].add(one.pid)
            if len(pids[key]) == one.world:
                yield Together(one.at, one.generation, one.step, frozenset(pids[key]))


def step_us(said: Sequence[Said]) -> float:
    """Return the median time of a step, in microseconds."""
    ends = [step.at for step in steps_together(said)]
    return 1e6 * median(after - before for before, after in pairwise(ends))


def recovery(said: Sequence[Said], ranks: int, victim: int, since: float) -> Recovery | None:
    """Return what it took to go on after a kill; None if the job does not yet.

    Args:
        said: What the ranks have said, also before the kill.
        ranks: Number of ranks before the kill.
        victim: The process that was killed.
        since: When.
    """
    after = [one for one in said if one.at > since]
    found = [s for s in steps_together(after) if victim not in s.pids and len(s.pids) >= ranks - 1]
    whole = [step for step in found if len(step.pids) == ranks]
    if not whole:
        return None
    return Recovery(
        found[0].at - since, lost_steps(said, victim, since, found[0]), whole[0].at - since
    )


def lost_steps(said: Sequence[Said], victim: int, since: float, first: Together) -> int:
    """Count the steps that were begun before the first one that succeeded, and are lost.

    These are steps that have been begun, but not committed, by the rank with most of them, and
    committed steps that are taken again.
    """
    mine: dict[int, list[Said]] = defaultdict(list)
    for one in said:
        mine[one.pid].append(one)
    old = [its for pid, its in mine.items() if pid != victim and its[0].at < since]
    latest = max(
        (one.step for its in old for one in its if _is_before(one, first)), default=first.step - 1
    )
    return max(_not_committed(its, since, first) for its in old) + max(0, latest + 1 - first.step)


def _is_before(one: Said, first: Together) -> bool:
    """Whether it is a step that was committed before the first one that succeeded."""
    is_first = one.pid in first.pids and (one.generation, one.step) == first[1:3]
    return one.what == COMMITTED and one.at <= first.at and not is_first


def _not_committed(its: Sequence[Said], since: float, first: Together) -> int:
    """How many steps a rank began without success, from the one in which the kill was."""
    count = 0
    for one in its:
        if one.at > first.at:
            break
        if one.what == BEGAN:
            count += 1
        elif one.at < since:
            count = 0
        else:
            count -= 1
            if (one.generation, one.step) == (first.generation, first.step):
                break
    return count
