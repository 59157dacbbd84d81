"""The results of `scaling`, as a table and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from benchmarks import machine
from benchmarks.ddp import share
from benchmarks.ddp_variants import NO_COMM
from benchmarks.results import SCHEMA, Measurement, Report
from benchmarks.scaling.link_speed import HIGH, LOW
from benchmarks.scaling.measure import Row
from benchmarks.table import spread


def scaling_table(rows: Sequence[Row], rounds: int) -> Table:
    """Return a table with one row per model, layout and variant."""
    table = Table(
        title="training under DDP across nodes, "
        f"{machine.describe()['cores']} cores for all of them",
        caption="share: of communication in gloo's step; efficiency: the step without any, in the "
        "same processes, over this step; ranks: whether all have the same bits of weights and "
        "gradients; gradients: of the untrained model, their difference from gloo's as a share of "
        f"the largest; medians of {rounds} alternating rounds",
        box=box.SIMPLE_HEAD,
    )
    for name in ("model", "nodes\nx ranks", "Gbit/s", "share", "over"):
        table.add_column(name, no_wrap=True)
    for name in ("ms/step", "rounds", "efficiency", "x gloo"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("ranks", "gradients"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        place = [row.model, str(row.layout), f"{row.gbit:g}", f"{row.trial.share:.0%}"]
        for m in row.found.measurements:
            table.add_row(*place, *_cells(row.found, m))
            place = [""] * len(place)
        table.add_section()
    return table


def _cells(found: Report, m: Measurement) -> list[str]:
    step = [m.variant, f"{m.us / 1e3:.0f}", spread(m)]
    if m.variant == NO_COMM:
        return [*step, "-", "-", "", ""]
    return [
        *step,
        f"{share(found, m):.1%}",
        f"{found.speedup(m):.2f}",
        "equal" if m.facts["ranks_agree"] else "DIFFER",
        _against_gloo(m),
    ]


def _against_gloo(m: Measurement) -> str:
    difference = m.facts.get("gradients")
    if difference is None:
        return ""
    if difference["bitwise_equal"]:
        return "equal"
    apart = difference["largest_difference"] / difference["largest_gradient"]
    return f"within {apart:.0e}"


def notes(rows: Sequence[Row]) -> list[str]:
    """Return notes on the models, and on rows that missed the wanted share."""
    sizes = {row.model: (row.gradients, row.found.facts["parameters"]) for row in rows}
    lines = [
        f"{model}: {count} gradients, {parameters / 1e6:.1f} M parameters"
        for model, (count, parameters) in sizes.items()
    ]
    missed = [row for row in rows if not LOW <= row.trial.share <= HIGH]
    return lines + [
        f"{row.model} on {row.layout}: gloo's share is not within {LOW:.0%} to {HIGH:.0%}"
        for row in missed
    ]


def to_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Return plain data."""
    cells = [
        {
            "model": row.model,
            "layout": str(row.layout),
            "gbit": row.gbit,
            "gloo_share": round(row.trial.share, 4),
            "gradient_tensors": row.gradients,
            "found": row.found.to_json(),
        }
        for row in rows
    ]
    return {"schema": SCHEMA, "operation": "scaling", "rows": cells}
