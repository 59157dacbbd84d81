"""Compares each collective over all ranks: which arrived last, and which did not arrive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from sdp_plugins.trace.rank_trace import GroupKey, RankTrace, Seen, together
from sdp_plugins.trace.trace_file import Json


class Verdict(NamedTuple):
    """A collective according to the traces of all ranks.

    Attributes:
        number: Its id in the merged trace.
        came: The ranks that began it, in order of arrival.
        late_us: Microseconds between the first and the last arrival.
        failed: Whether it failed on one of the ranks.
        absent: If it failed, the ranks that did not begin it.
    """

    number: int
    came: tuple[int, ...]
    late_us: float
    failed: bool
    absent: tuple[int, ...]


Verdicts = dict[GroupKey, dict[int, Verdict]]


def compared(traces: list[RankTrace]) -> Verdicts:
    """Compare each collective; the ranks' times must be of one clock."""
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
    """Format the absent ranks; it is not certain for ranks without a trace, which are marked."""
    return ", ".join(
        f"rank {rank}" + ("" if rank in with_trace else " (no trace)") for rank in verdict.absent
    )


def completed(event: Json, rank: int, verdict: Verdict, with_trace: set[int]) -> Iterator[Json]:
    """Complete a rank's slice of a collective by the other ranks' data; also yields its arrow."""
    args = event["args"]
    if "failed" in args:
        args["did not arrive"] = absentees(verdict, with_trace) or "all arrived"
    elif len(verdict.came) > 1:
        args["last to arrive"] = f"rank {verdict.came[-1]}"
        args["late_us"] = verdict.late_us
    yield event
    if len(verdict.came) > 1:
        place = verdict.came.index(rank)
        phase = "s" if place == 0 else "f" if place == len(verdict.came) - 1 else "t"
        arrow = {key: event[key] for key in ("name", "ts", "pid", "tid")}
        yield {**arrow, "cat": "same operation", "ph": phase, "id": verdict.number, "bp": "e"}
