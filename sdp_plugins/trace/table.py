"""The last operations of each rank, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sdp_plugins.core.flight.names import named, seconds
from sdp_plugins.core.flight.sheet import Sheet
from sdp_plugins.core.trace.events import FAILED, Event


def table(sheets: Sequence[Sheet], last: int) -> list[str]:
    """The last operations of each rank in each group, the newest at the end.

    Args:
        sheets: Of the ranks.
        last: How many of each.
    """
    rows = [("rank", "group", "called", "took", "operation")]
    for sheet in sorted(sheets, key=lambda s: (s.about.job_rank, s.about.name)):
        rows += _rows(sheet, last)
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["", *("  ".join([*map(str.ljust, row, widths), row[4]]) for row in rows)]


def _rows(sheet: Sheet, last: int) -> Iterator[tuple[str, str, str, str, str]]:
    about = sheet.about
    events = sorted((*sheet.operations, *sheet.messages), key=lambda event: event.issued)
    for event in events[-last:]:
        ago = f"{seconds(sheet.read_ns - event.issued)} ago"
        yield str(about.job_rank), about.name, ago, _took(event), named(event, about)


def _took(event: Event) -> str:
    if not event.finished:
        return "not done" if event.started else "queued"
    took = seconds(event.finished - event.issued)
    return f"{took}, failed" if event.flags & FAILED else took
