"""all_reduce across nodes of a testbed: every library against the limit of the links."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.table import Table

from benchmarks import machine
from benchmarks.libraries import LibrarySpec
from benchmarks.mpi import MpiInstall
from benchmarks.results import Progress, Report
from benchmarks.runner import LibraryJobs, Plan, measure
from benchmarks.testbed import start
from benchmarks.testbed.network import Network
from benchmarks.units import format_size

DTYPE = "float32"
COUNTED_CALLS = 4


@dataclass(frozen=True)
class Layout:
    """The number of nodes, and of ranks on each."""

    nodes: int
    ranks: int

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse `4x2`.

        Raises:
            ValueError: The text has another form.
        """
        nodes, by, ranks = text.partition("x")
        if not (by and nodes.isdecimal() and ranks.isdecimal() and int(nodes) and int(ranks)):
            raise ValueError(f"{text!r} is not a layout: write nodes x ranks of each, such as 4x2")
        return cls(int(nodes), int(ranks))

    def __str__(self) -> str:
        """Return the form that `parse` reads."""
        return f"{self.nodes}x{self.ranks}"


@dataclass(frozen=True)
class Row:
    """One layout at one speed.

    Attributes:
        wire_s: Seconds for the payload alone: 2S(M-1)/M bytes over every link and direction.
        times_s: Seconds of a call, by library.
        sent: Bytes that each node's link carried per call, in payloads, by library and node.
        skipped: Why libraries are missing.
    """

    layout: Layout
    gbit: float
    wire_s: float
    times_s: dict[str, float] = field(default_factory=dict)
    sent: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def wire_limit_s(layout: Layout, nbytes: int, gbit: float) -> float:
    """Return the seconds that the payload needs on otherwise idle links."""
    return payload(layout, nbytes) * 8 / (gbit * 1e9)


def payload(layout: Layout, nbytes: int) -> float:
    """Return the bytes that have to leave every node."""
    return 2 * nbytes * (layout.nodes - 1) / layout.nodes


def run(
    layout: Layout,
    gbit: float,
    nbytes: int,
    libraries: Sequence[LibrarySpec],
    mpis: Sequence[MpiInstall],
    effort: Plan,
    progress: Progress,
) -> Row:
    """Measure one layout with all libraries, alternating."""
    plan = Plan(
        nbytes=(nbytes,),
        dtypes=(DTYPE,),
        ranks=layout.nodes * layout.ranks,
        rounds=effort.rounds,
        round_s=effort.round_s,
    )
    row = Row(layout, gbit, wire_limit_s(layout, nbytes, gbit))
    report = Report(plan.operation, asdict(plan), {})
    with (
        Network(layout.nodes, gbit) as network,
        LibraryJobs(plan, report, mpis, start.on(network)) as jobs,
    ):
        for library in libraries:
            progress(f"{layout} at {gbit:g} Gbit/s: starting {library.name}")
            jobs.start(library)
        measure(plan, report, jobs, DTYPE, nbytes, progress)
        for name in jobs.libraries:
            row.sent[name] = _count(jobs, name, network, payload(layout, nbytes))
    for found in report.measurements:
        row.times_s[found.variant] = found.us / 1e6
    row.skipped.update(report.skipped)
    return row


def _count(jobs: LibraryJobs, library: str, network: Network, unit: float) -> list[float]:
    counted = network.count(lambda: jobs.call(library, "repeat", times=COUNTED_CALLS))
    return [nbytes / COUNTED_CALLS / unit for nbytes in counted]


def nodes_table(rows: Sequence[Row], nbytes: int, rounds: int) -> Table:
    """Return a table with one row per layout, speed and library."""
    table = Table(
        title=f"all_reduce of {format_size(nbytes)} {DTYPE} across nodes, "
        f"{machine.describe()['cores']} cores for all of them",
        caption="x wire: the time that the payload's 2S(M-1)/M bytes need on the links; medians "
        f"of {rounds} alternating rounds. Link: bytes at a node's interface, headers and all, per "
        "byte of payload; spread: how much more the busiest node has than the least busy one",
        box=box.SIMPLE_HEAD,
    )
    for name in ("nodes x ranks", "Gbit/s", "wire ms", "library", "ms", "x wire", "link", "spread"):
        justify: Any = "left" if name in ("nodes x ranks", "library") else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for row in rows:
        place = [str(row.layout), f"{row.gbit:g}", f"{row.wire_s * 1e3:.0f}"]
        for library, time_s in row.times_s.items():
            sent = row.sent.get(library, [])
            table.add_row(
                *place,
                library,
                f"{time_s * 1e3:.0f}",
                f"{time_s / row.wire_s:.2f}",
                f"{sum(sent) / len(sent):.3f}" if sent else "-",
                f"{100 * (max(sent) / min(sent) - 1):.1f} %" if sent else "-",
            )
            place = ["", "", ""]
        table.add_section()
    return table


def notes(rows: Sequence[Row]) -> list[str]:
    """Return why libraries are missing."""
    lines = {f"{library}: {why}" for row in rows for library, why in row.skipped.items()}
    return sorted(lines)


def to_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Return plain data."""
    data = [asdict(row) | {"layout": str(row.layout)} for row in rows]
    return {"machine": machine.describe(), "rows": json.loads(json.dumps(data))}
