"""Each collective over all ranks: who came last, and who did not come at all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from sdp_plugins.trace.folder import Json
from sdp_plugins.trace.rank_trace import GroupKey, RankTrace, Seen, together


class Verdict(NamedTuple):
    """What all ranks' traces say of a collective.

    Attributes:
        number: Names it in the merged trace.
        came: The ranks that began it, the first one first.
        late_us: How long after the first one the last one came.
        failed: Whether it has failed on one of them.
        absent: If it has failed, who has not begun it.
    """

    number: int
    came: tuple[int, ...]
    late_us: float
    failed: bool
    absent: tuple[int, ...]


Verdicts = dict[GroupKey, dict[int, Verdict]]


def compared(traces: list[RankTrace]) -> Verdicts:
    """Of each collective; the ranks' times must be of one clock."""
    found: Verdicts = defaultdict(dict)
    for number, (key, seq, seen) in enumerate(together(traces), 1):
        begun = sorted((operation.begin + trace.shift_us, trace.rank) for trace, operation in seen)
        failed = any(operation.failed for _, operation in seen)
        absent = _absent(key, seen) if failed else ()
        came, late_us = tuple(rank for _, rank in begun), round(begun[-1][0] - begun[0][0], 3)
        found[key][seq] = Verdict(number, came, late_us, failed, absent)
    return found


def _absent(key: GroupKey, seen: Seen) -> tuple[int, ...]:
    came = {rank for trace, _ in seen for other, rank in trace.groups.values() if other == key}
    return tuple(key.in_job(rank) for rank in sorted(set(range(key.world_size)) - came))


def absentees(verdict: Verdict, with_trace: set[int]) -> str:
    """Who did not come, in words: of whom there is no trace, that cannot be told from it."""
    return ", ".join(
        f"rank {rank}" + ("" if rank in with_trace else " (no trace)") for rank in verdict.absent
    )


def completed(event: Json, rank: int, verdict: Verdict, with_trace: set[int]) -> Iterator[Json]:
    """A rank's slice of a collective with what the others' say, and the arrow through it."""
    args = event["args"]
    if "failed" in args:
        args["did not come"] = absentees(verdict, with_trace) or "all came"
    elif len(verdict.came) > 1:
        args["last to arrive"] = f"rank {verdict.came[-1]}"
        args["late_us"] = verdict.late_us
    yield event
    if len(verdict.came) > 1:
        place = verdict.came.index(rank)
        phase = "s" if place == 0 else "f" if place == len(verdict.came) - 1 else "t"
        arrow = {key: event[key] for key in ("name", "ts", "pid", "tid")}
        yield {**arrow, "cat": "same operation", "ph": phase, "id": verdict.number, "bp": "e"}
