"""A training step under FSDP2 over gloo and smddp, in turn and in one job."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from sdp_plugins.bench import machine
from sdp_plugins.bench.ddp import DdpPlan, job_spec, rounds_ms
from sdp_plugins.bench.job import Job
from sdp_plugins.bench.runner import Progress

TASK = "sdp_plugins.bench.fsdp_task:FsdpTask"


@dataclass
class FsdpReport:
    """Milliseconds per step of every round, and how far the weights are apart afterwards."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    parameters: int
    rounds_ms: dict[str, list[float]]
    largest_difference: float

    @property
    def times_gloo(self) -> float:
        """How many times faster smddp is: the median of the rounds' ratios."""
        pairs = zip(self.rounds_ms["gloo"], self.rounds_ms["smddp"], strict=True)
        return median(gloo / smddp for gloo, smddp in pairs)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"schema": 1, "operation": "fsdp", **asdict(self), "times_gloo": self.times_gloo}


def run(plan: DdpPlan, progress: Progress = lambda text: None) -> FsdpReport:
    """Train over the plan's two backends, gloo and smddp, in turn.

    Raises:
        RankError: A rank failed.
    """
    progress("building a model per backend and rank")
    with Job(job_spec(plan, plan.backends, "fsdp", TASK)) as job:
        rounds = rounds_ms(job, plan, plan.backends, progress)
        one, other = plan.backends
        return FsdpReport(
            settings=asdict(plan),
            machine=machine.describe(),
            parameters=job.call("parameters")[0],
            rounds_ms=rounds,
            largest_difference=max(job.call("difference", {"one": one, "other": other})),
        )


def fsdp_table(report: FsdpReport) -> Table:
    """One row per backend."""
    s = report.settings
    table = Table(
        title=f"FSDP2 step, {report.parameters / 1e6:.0f} M parameters, batch {s['rows']} x "
        f"{s['tokens']}, {s['optimizer']}, {s['ranks']} ranks, {s['threads']} thread each",
        caption=f"medians of {s['rounds']} alternating rounds of {s['steps']} steps; x gloo: of "
        f"their ratios; weights differ by {report.largest_difference:.1e} at most afterwards",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("backend")
    for name in ("ms/step", "rounds", "x gloo"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, rounds in report.rounds_ms.items():
        table.add_row(
            name,
            f"{median(rounds):.1f}",
            f"{min(rounds):.1f} - {max(rounds):.1f}",
            f"{report.times_gloo:.2f}" if name == "smddp" else "1",
        )
    return table
