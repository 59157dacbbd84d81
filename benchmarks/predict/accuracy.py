"""Whether the costs that plans are chosen by agree with what `nodes` has measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.nodes import Layout
from benchmarks.predict.costs import with_options
from benchmarks.predict.exchange import agreement_s
from benchmarks.predict.table import brief
from sdp_plugins.core.internode.costs import Costs, choose
from sdp_plugins.core.internode.plan import Plan

OURS = "smddp"
"""What the names of our libraries begin with."""
SAME_SPEED = 0.2
"""By how much, relatively, a link that was measured may differ from its nominal speed."""


@dataclass(frozen=True)
class Comparison:
    """One all_reduce of one library.

    Attributes:
        layout: Nodes, and ranks of each.
        gbit: Speed of the links.
        library: Name.
        plan: What is chosen.
        predicted_s: What that should take.
        measured_s: What it took.
    """

    layout: Layout
    gbit: float
    library: str
    plan: Plan
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Share of what was measured by which the prediction is too long, or too short."""
        return self.predicted_s / self.measured_s - 1


def read(path: str, fallback: Costs) -> list[Comparison]:
    """Compare with what `nodes --json` has written.

    Args:
        path: Of the file.
        fallback: For libraries without costs of their own.

    Raises:
        ValueError: The file holds something else.
    """
    try:
        rows = json.loads(Path(path).read_text())["rows"]
        return [found for row in rows for found in _compare(row, fallback)]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not what `nodes --json` writes: {error!r}") from error


def _compare(row: dict[str, Any], fallback: Costs) -> list[Comparison]:
    layout, gbit = Layout.parse(row["layout"]), float(row["gbit"])
    if layout.nodes < 2:
        return []
    # The row says what the payload's 2S(M-1)/M bytes need on the wire.
    moved = row["wire_s"] * gbit * 1e9 / 8
    nbytes = round(moved * layout.nodes / (2 * (layout.nodes - 1)))
    found = []
    for library, measured_s in row["times_s"].items():
        if library.startswith(OURS):
            own = (row.get("costs") or {}).get(library)
            costs = _costs(own) if own else _at_speed(fallback, gbit)
            plan = choose(costs, layout.nodes, nbytes)
            predicted_s = agreement_s(costs, layout.nodes) + costs.seconds(plan, nbytes)
            found.append(Comparison(layout, gbit, library, plan, predicted_s, measured_s))
    return found


def _costs(own: Any) -> Costs:
    """Costs in a row, which are JSON in a string or already read."""
    return Costs.from_json(own if isinstance(own, str) else json.dumps(own))


def _at_speed(costs: Costs, gbit: float) -> Costs:
    """Costs as they are if they were measured at this speed, else for the same nodes at it.

    A link carries somewhat less payload than its speed, which only a measurement at it tells.
    """
    same = abs(8e-9 / costs.byte_s / gbit - 1) < SAME_SPEED
    return costs if same else with_options(costs, gbit=gbit)


def accuracy_table(comparisons: Sequence[Comparison]) -> Table:
    """One line per layout, speed and library."""
    table = Table(title="all_reduce: predicted and measured", box=box.SIMPLE_HEAD)
    for name in (
        "nodes x ranks",
        "Gbit/s",
        "library",
        "plan",
        "predicted ms",
        "measured ms",
        "error",
    ):
        justify: Any = "right" if name[-2:] in ("/s", "ms", "or") else "left"
        table.add_column(name, justify=justify, no_wrap=True)
    for found in comparisons:
        table.add_row(
            str(found.layout),
            f"{found.gbit:g}",
            found.library,
            brief(found.plan),
            f"{found.predicted_s * 1e3:.1f}",
            f"{found.measured_s * 1e3:.1f}",
            f"{found.error:+.1%}",
        )
    return table


def notes(comparisons: Sequence[Comparison]) -> list[str]:
    """The middle and the worst error."""
    if not comparisons:
        return [f"no library named {OURS}... was measured"]
    errors = [abs(found.error) for found in comparisons]
    worst = max(comparisons, key=lambda found: abs(found.error))
    return [
        f"error: median {median(errors):.1%}, worst {max(errors):.1%} ({worst.library}, "
        f"{worst.layout} at {worst.gbit:g} Gbit/s)"
    ]


def to_json(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Plain data."""
    return [
        asdict(found) | {"layout": str(found.layout), "plan": str(found.plan), "error": found.error}
        for found in comparisons
    ]
