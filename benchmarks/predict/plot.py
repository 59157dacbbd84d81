"""Plots the results of `predict`: scaling efficiency over nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator, PercentFormatter

from benchmarks.plot import COLOURS, MARKERS
from benchmarks.predict.costs import described
from benchmarks.predict.simulation import Row, Setting
from sdp_plugins.core.internode.cost_model import Costs


def draw(rows: Sequence[Row], setting: Setting, costs: Costs, path: Path) -> None:
    """Write a PNG with one curve per method."""
    nodes = [row.nodes for row in rows]
    curves = {
        "smddp": [row.ours_s for row in rows],
        "ring over all ranks": [row.ring_s for row in rows],
        "parameter servers, whole tensors": [row.servers_s for row in rows],
    }
    figure, axes = plt.subplots(figsize=(8.5, 5), layout="constrained")
    for (name, times_s), colour, marker in zip(curves.items(), COLOURS, MARKERS, strict=False):
        shares = [setting.compute_s / time_s for time_s in times_s]
        axes.plot(
            *(nodes, shares),
            label=name,
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.8,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [str(count) for count in nodes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylim(0, 1.02)
    axes.set_title(
        f"simulated training of {setting.model}: computing over the step", loc="left", fontsize=11
    )
    axes.set_xlabel(f"nodes of {setting.ranks_per_node} ranks")
    axes.set_ylabel("scaling efficiency")
    axes.grid(which="major", color="0.88")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.text(0.01, -0.03, described(costs), fontsize=8, color="0.4")
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
