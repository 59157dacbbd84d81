"""Reports as rich tables, on the terminal or as Markdown."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.results import Measurement, Report
from benchmarks.units import format_time


@dataclass(frozen=True)
class Column:
    """A column of a report's table.

    Attributes:
        header: The column's name.
        cell: Returns a measurement's text in this column.
        number: Whether cells are right-aligned.
    """

    header: str
    cell: Callable[[Measurement], str]
    number: bool = True


def of_case(header: str, key: str) -> Column:
    """Return a column of text that all measurements of one case share."""
    return Column(header, lambda m: str(m.case[key]), number=False)


def variant(header: str) -> Column:
    """Return the column of the variants' names."""
    return Column(header, lambda m: m.variant, number=False)


def spread(m: Measurement) -> str:
    """Return the lowest and the highest round."""
    return f"{format_time(min(m.rounds_us))} - {format_time(max(m.rounds_us))}"


def milliseconds(digits: int = 0) -> Column:
    """Return the column of the time of a step."""
    return Column("ms/step", lambda m: f"{m.us / 1e3:.{digits}f}")


ROUNDS = Column("rounds", spread)
LATENCY = Column("latency", lambda m: format_time(m.us))


def faster(report: Report, over: str = "gloo", but: Collection[str] = ()) -> Column:
    """Return the column of speedups over a variant, empty for those in `but`."""

    def cell(m: Measurement) -> str:
        times = None if m.variant in but else report.speedup(m, over)
        return f"{times:.2f}" if times else "-"

    return Column(f"x {over}", cell)


def render(
    report: Report, title: str, caption: str, columns: Sequence[Column], only: str = ""
) -> Table:
    """Return one row per measurement, or per measurement of one variant, grouped by case."""
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD)
    for column in columns:
        justify: Any = "right" if column.number else "left"
        table.add_column(column.header, justify=justify, no_wrap=True)
    before = None
    for m in [m for m in report.measurements if only in ("", m.variant)]:
        if not only and before not in (None, m.case):
            table.add_section()
        table.add_row(
            *(column.cell(m) for column in columns),
            style="dim" if m.facts.get("reference") else None,
        )
        before = m.case
    return table


def ranks_and_threads(report: Report) -> str:
    """Return the numbers of ranks and threads, for a title."""
    return f"{report.settings['ranks']} ranks, {report.settings['threads']} thread each"


def notes(report: Report) -> list[str]:
    """Return versions, and reasons for missing variants."""
    lines = [f"{name}: {version}" for name, version in report.versions.items()]
    return lines + [f"not measured: {name}: {why}" for name, why in report.skipped.items()]


def to_markdown(table: Table) -> str:
    """Convert the table to Markdown."""
    plain = copy(table)
    plain.box, plain.title, plain.caption = box.MARKDOWN, None, None
    for column in plain.columns:
        column.header = str(column.header).replace("\n", " ")
    text = io.StringIO()
    Console(file=text, width=400, no_color=True).print(plain)
    lines = [line.strip() for line in text.getvalue().splitlines() if line.strip()]
    header, rule, *rest = lines
    # a Markdown table has only one rule; sections would draw more
    rows = "\n".join([header, rule, *(line for line in rest if line.strip("|- "))])
    return f"{table.title or ''}\n\n{rows}\n\n{table.caption or ''}\n"


def replace_section(path: Path, name: str, text: str) -> None:
    """Replace the text between a file's `<!-- NAME begin -->` and `<!-- NAME end -->`.

    Raises:
        ValueError: The file has no such section.
    """
    begin, end = f"<!-- {name} begin -->", f"<!-- {name} end -->"
    before, found, rest = path.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{path} has no section {begin} ... {end}")
    path.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")
