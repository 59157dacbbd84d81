"""Plots a report: latency and bus bandwidth over size, both log-log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import quantiles
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.all_reduce import busbw_gbps
from benchmarks.libraries import LIBRARIES
from benchmarks.results import Measurement, Report
from benchmarks.units import format_size

Value = Callable[[Measurement], float]
# Okabe and Ito's palette, which colour-blind readers can distinguish.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
REFERENCE: dict[str, Any] = {"color": "0.45", "linewidth": 1.2, "markersize": 3, "marker": "."}
WHISKERS: dict[str, Any] = {"elinewidth": 1.0, "capsize": 2.5, "alpha": 0.8}
DASHES = ("--", ":", "-.")


def draw(report: Report, path: Path) -> None:
    """Write a PNG with one row of plots per dtype."""
    dtypes = list(dict.fromkeys(m.case["dtype"] for m in report.measurements))
    figure, axes = plt.subplots(
        len(dtypes), 2, figsize=(12, 4.9 * len(dtypes)), squeeze=False, layout="constrained"
    )
    for (left, right), dtype in zip(axes, dtypes, strict=True):
        series = _series(report, dtype)
        _curves(left, series, lambda m: m.us, f"all_reduce {dtype}: time per call", "microseconds")
        moving = {library: ms for library, ms in series.items() if LIBRARIES[library].reduces}
        _curves(right, moving, busbw_gbps, f"all_reduce {dtype}: bus bandwidth", "1e9 bytes/s")
        left.legend(frameon=False, fontsize=9)
    settings, host = report.settings, report.machine
    figure.suptitle(
        f"{settings['ranks']} ranks, {settings['threads']} thread each - {host['cpu']}, "
        f"{host['cores']} cores - medians and quartiles of {settings['rounds']} alternating rounds",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _series(report: Report, dtype: str) -> dict[str, list[Measurement]]:
    series: dict[str, list[Measurement]] = {}
    for m in sorted(report.measurements, key=lambda m: m.case["nbytes"]):
        if m.case["dtype"] == dtype:
            series.setdefault(m.variant, []).append(m)
    order = {library: i for i, library in enumerate(report.versions)}
    return dict(sorted(series.items(), key=lambda item: order.get(item[0], 99)))


def _curves(
    axes: Axes,
    series: dict[str, list[Measurement]],
    value: Value,
    title: str,
    unit: str,
) -> None:
    styles = _styles(list(series))
    for library, points in series.items():
        sizes, middle = [m.case["nbytes"] for m in points], [value(m) for m in points]
        spread = list(zip(*[_spread(m, value) for m in points], strict=True))
        axes.plot(sizes, middle, label=library, **styles[library])
        axes.errorbar(
            sizes, middle, spread, fmt="none", ecolor=styles[library]["color"], **WHISKERS
        )
    ticks = sorted({m.case["nbytes"] for points in series.values() for m in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [format_size(n) for n in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("buffer of each rank")
    axes.set_ylabel(unit)
    axes.grid(which="major", color="0.88")
    axes.spines[["top", "right"]].set_visible(False)


def _spread(m: Measurement, value: Value) -> tuple[float, float]:
    """Return the distances of the rounds' quartiles from the median."""
    rounds = [value(replace(m, rounds_us=(us,))) for us in m.rounds_us]
    middle = value(m)
    low, _, high = quantiles(rounds, n=4, method="inclusive") if len(rounds) > 1 else [middle] * 3
    return max(0.0, middle - low), max(0.0, high - middle)


def _styles(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return coloured styles for libraries and grey dashes for references, used in both panels."""
    styles: dict[str, dict[str, Any]] = {}
    libraries = [library for library in names if not LIBRARIES[library].reference]
    for i, library in enumerate(libraries):
        look = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        styles[library] = {**look, "markersize": 5, "linewidth": 1.8}
    for i, library in enumerate(library for library in names if library not in libraries):
        styles[library] = {**REFERENCE, "linestyle": DASHES[i % len(DASHES)]}
    return styles
