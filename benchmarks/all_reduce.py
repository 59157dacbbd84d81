"""The table and the bandwidths of all_reduce."""

from __future__ import annotations

from rich.table import Table

from benchmarks.results import Measurement, Report
from benchmarks.table import (
    LATENCY,
    ROUNDS,
    Column,
    faster,
    of_case,
    ranks_and_threads,
    render,
    variant,
)
from benchmarks.units import format_size


def algbw_gbps(m: Measurement) -> float:
    """Return the algorithm bandwidth: bytes of one rank's buffer per second, in 1e9 bytes/s."""
    return m.case["nbytes"] / m.us / 1e3


def busbw_gbps(m: Measurement) -> float:
    """Return the bus bandwidth, as nccl-tests' PERFORMANCE.md defines it.

    An all_reduce moves at least 2 (n - 1) / n of the data over every rank's link.
    """
    ranks = m.case["ranks"]
    return algbw_gbps(m) * 2 * (ranks - 1) / ranks


def all_reduce_table(report: Report) -> Table:
    """Return a table with one row per size and library, in the order of measurement."""
    host = report.machine
    return render(
        report,
        f"{report.operation}, {ranks_and_threads(report)}, {host['cpu']}, {host['cores']} cores",
        f"medians of {report.settings['rounds']} alternating rounds; rounds: lowest - highest; "
        "GB = 1e9 bytes; "
        "the memcpy and lower_bound references are timed in turn like the libraries: no bounds",
        [
            of_case("dtype", "dtype"),
            Column("size", lambda m: format_size(m.case["nbytes"]), number=False),
            variant("library"),
            LATENCY,
            ROUNDS,
            Column("algbw\nGB/s", lambda m: f"{algbw_gbps(m):.3g}"),
            Column("busbw\nGB/s", lambda m: f"{busbw_gbps(m):.3g}" if m.facts["reduces"] else ""),
            faster(report),
            Column("path", lambda m: m.facts["path"], number=False),
        ],
    )
