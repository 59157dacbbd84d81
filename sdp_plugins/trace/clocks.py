"""One clock for the traces of several nodes.

The ranks of a node share a clock. Between nodes, a collective in which every rank waits for all
others is an exchange of timestamps: nobody ends it before the last one has begun. Each such
operation bounds the difference of two clocks from both sides, and all of them together bound it to
about the shortest one's duration. That costs the job nothing, and holds as well when it has failed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sdp_plugins.trace.rank_trace import RankTrace, Seen, together

EVERYBODY_WAITS = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})


@dataclass(frozen=True)
class Offset:
    """What has to be added to a clock's times.

    Attributes:
        us: Microseconds.
        accuracy_us: How far off that can be, if the clocks run equally fast; None: the nodes' wall
            clocks had to do, which are as good as their NTP is.
    """

    us: float
    accuracy_us: float | None


def align(traces: list[RankTrace]) -> dict[str, Offset]:
    """Offsets that make all clocks show what the first rank's does."""
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
