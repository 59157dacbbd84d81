"""Reports as rich tables, on the terminal or as Markdown."""

from __future__ import annotations

import io
from copy import copy
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from sdp_plugins.bench.peers import PEERS
from sdp_plugins.bench.results import Measurement, Report
from sdp_plugins.bench.units import format_size, format_time


def collective_table(report: Report) -> Table:
    """One row per size and peer, in the order of measurement."""
    settings, host = report.settings, report.machine
    table = Table(
        title=f"{report.operation}, {settings['ranks']} ranks, {settings['threads']} thread each, "
        f"{host['cpu']}, {host['cores']} cores",
        caption=f"medians of {settings['rounds']} alternating rounds; rounds: lowest - highest; "
        "GB = 1e9 bytes; "
        "the memcpy and floor yardsticks are timed in turn like the peers: no bounds",
        box=box.SIMPLE_HEAD,
    )
    for name in ("dtype", "size", "peer"):
        table.add_column(name, no_wrap=True)
    for name in ("latency", "rounds", "algbw\nGB/s", "busbw\nGB/s", "x gloo"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("path", no_wrap=True)
    previous = None
    for m in report.measurements:
        if previous not in (None, (m.dtype, m.nbytes)):
            table.add_section()
        table.add_row(*_cells(report, m), style="dim" if PEERS[m.peer].reference else None)
        previous = (m.dtype, m.nbytes)
    return table


def _cells(report: Report, m: Measurement) -> list[str]:
    moves_data = m.operation == "all_reduce"
    faster = report.speedup(m)
    return [
        m.dtype if moves_data else "",
        format_size(m.nbytes) if moves_data else "",
        m.peer,
        format_time(m.latency_us),
        f"{format_time(min(m.rounds_us))} - {format_time(max(m.rounds_us))}",
        f"{m.algbw_gbps:.3g}" if moves_data else "",
        f"{m.busbw_gbps:.3g}" if moves_data and PEERS[m.peer].reduces else "",
        f"{faster:.2f}" if faster else "-",
        m.path,
    ]


def notes(report: Report) -> list[str]:
    """Versions and what was left out."""
    lines = [f"{peer}: {version}" for peer, version in report.versions.items()]
    return lines + [f"not measured: {peer}: {why}" for peer, why in report.skipped.items()]


def to_markdown(table: Table) -> str:
    """The same table in Markdown."""
    plain = copy(table)
    plain.box, plain.title, plain.caption = box.MARKDOWN, None, None
    for column in plain.columns:
        column.header = str(column.header).replace("\n", " ")
    text = io.StringIO()
    Console(file=text, width=400, no_color=True).print(plain)
    lines = [line.strip() for line in text.getvalue().splitlines() if line.strip()]
    header, rule, *rest = lines
    # Markdown has one rule only; sections would draw more
    rows = "\n".join([header, rule, *(line for line in rest if line.strip("|- "))])
    return f"{table.title or ''}\n\n{rows}\n\n{table.caption or ''}\n"


def replace_section(path: Path, name: str, text: str) -> None:
    """Replace what stands between a file's `<!-- NAME begin -->` and `<!-- NAME end -->`.

    Raises:
        ValueError: The file has no such section.
    """
    begin, end = f"<!-- {name} begin -->", f"<!-- {name} end -->"
    before, found, rest = path.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{path} has no section {begin} ... {end}")
    path.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}")
