"""Prints a report for a reader: what is wrong first, and the verdict last."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sdp_plugins.doctor.finding import Finding, Status
from sdp_plugins.doctor.report import Report

_STYLES = {
    Status.error: "bold red",
    Status.warning: "yellow",
    Status.skipped: "dim",
    Status.ok: "green",
}
_WIDTH = 8


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the caller; rich would end the program."""
        raise BrokenPipeError


def show(report: Report, everything: bool) -> None:
    """Print to stdout; without colours and line breaks of ours unless it is a terminal."""
    console = _Output(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())
    for one in (report, *report.hosts):
        if report.hosts:
            console.print(Text(f"== {one.host} ==", "bold"))
        for label, text in lines(one.findings, everything):
            apart = label and sys.stdout.isatty()
            console.print(_in_columns(label, text) if apart else label + text)
    for one in filter(lambda one: one.verdict, (report, *report.hosts)):
        name = f"{one.host}: " if report.hosts else ""
        console.print(Text(name + one.verdict, "bold"))


def _in_columns(label: Text, text: Text) -> Table:
    """Two columns, so that the lines of a long text stay beside its label."""
    columns = Table.grid()
    columns.add_column(no_wrap=True)
    columns.add_column()
    columns.add_row(label, text)
    return columns


def lines(findings: Sequence[Finding], everything: bool) -> Iterator[tuple[Text, Text]]:
    """The findings by subject; the subjects with the worst problems, and these, come first.

    Returns:
        A label and a text for each line.
    """
    order = list(Status)
    worst = {f.subject: order.index(Status.ok) for f in findings}
    for finding in findings:
        worst[finding.subject] = min(worst[finding.subject], order.index(finding.status))
    places = list(worst)
    shown = [finding for finding in findings if everything or finding.is_problem]
    shown.sort(key=lambda f: (worst[f.subject], places.index(f.subject), order.index(f.status)))
    for subject, group in groupby(shown, key=lambda finding: finding.subject):
        yield Text(), Text(subject, "bold")
        for finding in group:
            yield from _lines_of(finding)
    yield Text(), Text(_counted(findings, everything), "dim")


def _lines_of(finding: Finding) -> Iterator[tuple[Text, Text]]:
    label = Text(f"  {finding.status.value:{_WIDTH}}", _STYLES[finding.status])
    yield label, Text(f"{finding.check}: {finding.text}")
    if finding.remedy:
        yield Text(f"  {'':{_WIDTH}}"), Text(f"Hint: {finding.remedy}")


def _counted(findings: Sequence[Finding], everything: bool) -> str:
    counts = [
        f"{sum(f.status is status for f in findings)} {status.value}" for status in (*Status,)[::-1]
    ]
    more = "" if everything else " (--all shows them)"
    return ", ".join(counts) + more
