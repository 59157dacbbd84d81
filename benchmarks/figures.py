"""Draws the figures of the documentation from the tables that stand there."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plot import COLOURS, MARKERS

DOCS = Path(__file__).parents[1] / "docs"
OURS, PEERS, REFERENCE = COLOURS[1], "#9AA7B5", "#D5DBE1"
NAMES = {"mpich": "MPICH", "openmpi": "Open MPI", "zero": "ZeRO", "fsdp2": "FSDP2"}
UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
Row = dict[str, str]


def rows(page: str, name: str) -> list[Row]:
    """The rows of a table that a benchmark has written into a page."""
    text = (DOCS / page).read_text()
    (section,) = re.findall(f"<!-- {name} begin -->(.*?)<!-- {name} end -->", text, re.DOTALL)
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(head, row, strict=True)) for row in body]


def milliseconds(text: str) -> float:
    """Read a time such as ``3.35 us``."""
    value, unit = text.split()
    return float(value) * UNITS[unit]


def bars(axes: Axes, title: str, times: dict[str, float], ours: set[str], none: str = "") -> None:
    """Draw one horizontal bar for each name, with its time."""
    names = list(times)
    colours = [OURS if n in ours else REFERENCE if n == none else PEERS for n in names]
    drawn = axes.barh([NAMES.get(n, n) for n in names], list(times.values()), color=colours)
    axes.bar_label(drawn, fmt=lambda ms: f"{ms:.3g} ms", padding=4)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.margins(x=0.15)


def of_size(size: str) -> dict[str, float]:
    """The times of an all_reduce by library."""
    found = [row for row in rows("benchmarks.md", "all_reduce") if row["size"] == size]
    return {row["library"]: milliseconds(row["latency"]) for row in found}


def of_step(table: str) -> dict[str, float]:
    """The times of a training step by the way of data parallelism."""
    found = rows("sharding.md", f"step {table}")
    return {row["data parallelism"]: float(row["ms/step"]) for row in found}


def performance() -> Figure:
    """What the README shows: a bucket's all_reduce, and a training step."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 2.6), layout="constrained")
    times = of_size("25 MiB")
    chosen = {name: times[name] for name in ("gloo", "mpich", "openmpi", "smddp")}
    bars(left, "all_reduce of 25 MiB", chosen, {"smddp"})
    step = of_step("adamw")
    shown = {
        "gloo": step["gloo"],
        "smddp": step["smddp"],
        "ZeRO over smddp": step["zero"],
        "no data parallelism": step["none"],
        "ShardedOptimizer": step["sharded"],
    }
    ours = {"smddp", "ShardedOptimizer"}
    title = "training step, 41 M parameters, AdamW"
    bars(right, title, shown, ours, none="no data parallelism")
    return figure


def all_reduce() -> Figure:
    """The time of an all_reduce over its size."""
    table = rows("benchmarks.md", "all_reduce")
    sizes = list(dict.fromkeys(row["size"] for row in table))
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    names = ("gloo", "mpich", "openmpi", "smddp", "core", "memcpy")
    for name, colour, marker in zip(names, COLOURS, MARKERS, strict=False):
        times = [milliseconds(r["latency"]) for r in table if r["library"] == name]
        axes.plot(sizes, times, color=colour, marker=marker, label=NAMES.get(name, name))
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds")
    axes.set_title("all_reduce of float32, two ranks", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def collectives() -> Figure:
    """How many times as fast as gloo each collective is."""
    found = [r for r in rows("benchmarks.md", "collectives") if r["a rank gives"] in ("25 MiB", "")]
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    drawn = axes.barh(
        [row["operation"] for row in found], [float(r["x gloo"]) for r in found], color=OURS
    )
    axes.bar_label(drawn, fmt="%.1f", padding=4)
    axes.axvline(1, color="0.3", linewidth=1)
    axes.invert_yaxis()
    axes.set_title("times as fast as gloo, 25 MiB from each rank", loc="left", fontsize=11)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    return figure


def steps() -> Figure:
    """A training step by every way of data parallelism, for three optimizers."""
    tables = {"adamw": "AdamW", "fused_adamw": "AdamW, fused", "sgd": "SGD"}
    figure, all_axes = plt.subplots(1, 3, figsize=(11, 2.9), layout="constrained")
    for axes, (table, title) in zip(all_axes, tables.items(), strict=True):
        bars(axes, title, of_step(table), {"smddp", "direct", "sharded"}, none="none")
    for axes in all_axes[1:]:  # the names are those of the first
        axes.set_yticks([])
    return figure


FIGURES = (performance, all_reduce, collectives, steps)


def draw(folder: Path) -> None:
    """Write an SVG for each figure into a folder; the same tables give the same bytes."""
    plain = {"svg.hashsalt": "sdp_plugins", "svg.fonttype": "none", "font.family": "sans-serif"}
    with plt.rc_context(plain):
        for make in FIGURES:
            figure = make()
            path = folder / f"{make.__name__}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None})
            plt.close(figure)
