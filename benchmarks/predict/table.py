"""The results of `predict`, as a table and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.predict.costs import described
from benchmarks.predict.gradients import buckets, sizes_of
from benchmarks.predict.simulation import Row, Setting
from benchmarks.units import format_size
from sdp_plugins.core.internode.cost_model import Costs
from sdp_plugins.core.internode.plan import Algorithm, Plan


def predict_table(rows: Sequence[Row], setting: Setting) -> Table:
    """Return a table with one row per number of nodes."""
    table = Table(
        title=f"simulated training of {setting.model}, {setting.ranks_per_node} ranks per node, "
        f"{setting.compute_s * 1e3:g} ms of computing per step",
        caption="eff.: scaling efficiency, a rank's undisturbed computing over the step; ring: "
        "one over all ranks; servers: one per node, whole tensors, the busiest of them serves so "
        "many times the mean; plan: of our all_reduce for the largest bucket",
        box=box.SIMPLE_HEAD,
    )
    for name in ("nodes", "ours ms", "eff.", "ring ms", "eff.", "servers ms", "eff.", "x mean"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plan", no_wrap=True)
    for row in rows:
        cells = []
        for time_s in (row.ours_s, row.ring_s, row.servers_s):
            cells += [f"{time_s * 1e3:.0f}", f"{setting.compute_s / time_s:.1%}"]
        table.add_row(str(row.nodes), *cells, f"{row.imbalance:.1f}", brief(row.plan))
    return table


def brief(plan: Plan) -> str:
    """Return a short form of a plan, such as ``sharded 4^3 x 16, 2 MiB``."""
    powers = [(radix, len(list(alike))) for radix, alike in groupby(plan.radices)]
    radices = " x ".join(f"{radix}^{times}" if times > 1 else f"{radix}" for radix, times in powers)
    if plan.algorithm is Algorithm.recursive_multiplying:
        return f"multiplying {radices}"
    return f"sharded {radices}, {format_size(plan.segment_nbytes)}"


def notes(setting: Setting, costs: Costs) -> list[str]:
    """Return the parameters of the simulation."""
    sizes = sizes_of(setting.model)
    ring = "as between nodes" if setting.local_s is None else f"{setting.local_s * 1e6:g} us"
    return [
        f"{setting.model}: {len(sizes)} gradients, {format_size(sum(sizes))} of float32, in "
        f"{len(buckets(sizes))} buckets",
        described(costs),
        f"nodes are late by an exponentially distributed {setting.jitter:.1%} of the computing on "
        f"average; means of {setting.steps} steps, seed {setting.seed}",
        f"hops of the ring inside of a node: {ring}",
    ]


def to_json(rows: Sequence[Row], setting: Setting, costs: Costs) -> dict[str, Any]:
    """Return plain data."""
    found = [
        {
            "nodes": row.nodes,
            "step_s": {"ours": row.ours_s, "ring": row.ring_s, "servers": row.servers_s},
            "servers_imbalance": row.imbalance,
            "plan": str(row.plan),
        }
        for row in rows
    ]
    return {
        "schema": 1,
        "operation": "predict",
        "setting": asdict(setting),
        "costs": asdict(costs),
        "rows": found,
    }
