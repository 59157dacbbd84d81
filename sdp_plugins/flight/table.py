"""The last operations of each rank, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sdp_plugins.core.trace_event import FAILED, TraceEvent
from sdp_plugins.flight.formatting import format_duration, format_op
from sdp_plugins.flight.rank_snapshot import RankSnapshot


def table(snapshots: Sequence[RankSnapshot], last: int) -> list[str]:
    """The last operations of each rank in each group, as many as `last`, the newest at the end."""
    rows = [("rank", "group", "called", "took", "operation")]
    for snapshot in sorted(snapshots, key=lambda s: (s.info.global_rank, s.info.name)):
        rows += _rows(snapshot, last)
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["", *("  ".join([*map(str.ljust, row, widths), row[4]]) for row in rows)]


def _rows(snapshot: RankSnapshot, last: int) -> Iterator[tuple[str, str, str, str, str]]:
    info = snapshot.info
    events = sorted((*snapshot.operations, *snapshot.messages), key=lambda event: event.issued)
    for event in events[-last:]:
        ago = f"{format_duration(snapshot.read_ns - event.issued)} ago"
        yield str(info.global_rank), info.name, ago, _took(event), format_op(event, info)


def _took(event: TraceEvent) -> str:
    if not event.finished:
        return "not done" if event.started else "queued"
    took = format_duration(event.finished - event.issued)
    return f"{took}, failed" if event.flags & FAILED else took
