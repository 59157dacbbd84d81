"""A job as lines of text."""

from __future__ import annotations

from sdp_plugins.top.view import HEADINGS, GroupView, JobView

_LEFT = ("host", "now")


def lines_of(view: JobView) -> list[str]:
    """All that is known of the job."""
    lines = [view.title]
    for group in view.groups:
        lines += [group.title, *table(group)]
    return [*lines, *filter(None, [view.idle])]


def table(group: GroupView) -> list[str]:
    """The headings, and a line for each rank, in aligned columns."""
    rows = [HEADINGS, *(row.cells for row in group.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_line(row, widths) for row in rows]


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    cells = zip(HEADINGS, row, widths, strict=True)
    aligned = (c.ljust(w) if name in _LEFT else c.rjust(w) for name, c, w in cells)
    return "  " + "  ".join(aligned).rstrip()
