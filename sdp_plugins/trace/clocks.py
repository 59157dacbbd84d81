"""One clock for the traces of several nodes.

The ranks of a node share a clock. Between nodes, a collective in which every rank waits for all
others exchanges timestamps: no rank ends it before the last one has begun it. Each such operation
bounds the offset of two clocks from both sides, and all of them together bound it to about the
duration of the shortest one. This costs the job nothing, and also works if the job has failed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sdp_plugins.trace.rank_trace import RankTrace, Seen, together

EVERYBODY_WAITS = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})


@dataclass(frozen=True)
class Offset:
    """The offset to add to a clock's times.

    Attributes:
        us: The offset in microseconds.
        accuracy_us: Bound of its error, if the clocks run equally fast; None: it comes from the
            nodes' wall clocks, and is as accurate as their NTP.
    """

    us: float
    accuracy_us: float | None


def align(traces: list[RankTrace]) -> dict[str, Offset]:
    """The offsets of all clocks from the first rank's clock."""
    first = traces[0]
    offsets = {first.clock: Offset(0.0, 0.0)}
    for trace in traces:
        if trace.clock not in offsets:
            offsets[trace.clock] = _offset(first, trace, traces)
    return offsets


def _offset(first: RankTrace, other: RankTrace, traces: list[RankTrace]) -> Offset:
    low, high = float("-inf"), float("inf")
    for _, _, seen in together([t for t in traces if t.clock in (first.clock, other.clock)]):
        begins, ends = _times(seen)
        if {first.clock, other.clock} <= begins.keys():
            low = max(low, begins[first.clock] - ends[other.clock])
            high = min(high, ends[first.clock] - begins[other.clock])
    if low == float("-inf"):
        return Offset(other.wall_minus_monotonic_us - first.wall_minus_monotonic_us, None)
    return Offset((low + high) / 2, abs(high - low) / 2)


def _times(seen: Seen) -> tuple[dict[str, float], dict[str, float]]:
    """When the last rank of each clock has begun, and the first one ended."""
    begins: dict[str, list[float]] = defaultdict(list)
    ends: dict[str, list[float]] = defaultdict(list)
    for trace, operation in seen:
        if operation.name in EVERYBODY_WAITS and not operation.failed:
            begins[trace.clock].append(operation.begin)
            ends[trace.clock].append(operation.end)
    return (
        {clock: max(times) for clock, times in begins.items()},
        {clock: min(times) for clock, times in ends.items()},
    )
