"""What `scaling` found, as a table and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from sdp_plugins.bench import machine
from sdp_plugins.bench.ddp_yardsticks import NONE
from sdp_plugins.bench.scaling import Row
from sdp_plugins.bench.scaling_speed import HIGH, LOW
from sdp_plugins.bench.units import format_time


def scaling_table(rows: Sequence[Row], rounds: int) -> Table:
    """One line per model, layout and variant."""
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
        for variant in row.found.rounds_ms:
            table.add_row(*place, *_cells(row, variant))
            place = [""] * len(place)
        table.add_section()
    return table


def _cells(row: Row, variant: str) -> list[str]:
    found, rounds = row.found, row.found.rounds_ms[variant]
    times = f"{format_time(1e3 * min(rounds))} - {format_time(1e3 * max(rounds))}"
    step = [variant, f"{found.step_ms(variant):.0f}", times]
    if variant == NONE:
        return [*step, "-", "-", "", ""]
    return [
        *step,
        f"{found.share(variant):.1%}",
        f"{found.speedup(variant):.2f}",
        "equal" if found.ranks_agree[variant] else "DIFFER",
        _against_gloo(row, variant),
    ]


def _against_gloo(row: Row, variant: str) -> str:
    difference = row.found.gradients.get(variant)
    if difference is None:
        return ""
    if difference["bitwise_equal"]:
        return "equal"
    share = difference["largest_difference"] / difference["largest_gradient"]
    return f"within {share:.0e}"


def notes(rows: Sequence[Row]) -> list[str]:
    """The models, and where the wanted share was missed."""
    sizes = {row.model: (row.gradients, row.found.parameters) for row in rows}
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
    """Plain data."""
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
    return {"schema": 1, "operation": "scaling", "rows": cells}
