"""A training step under FSDP2 over gloo and smddp, alternating in one job."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from benchmarks import machine
from benchmarks.ddp import DdpPlan, job_spec, rounds_us
from benchmarks.job import Job
from benchmarks.results import Measurement, Progress, Report
from benchmarks.table import (
    ROUNDS,
    faster,
    milliseconds,
    ranks_and_threads,
    render,
    variant,
)

TASK = "benchmarks.fsdp_task:FsdpTask"


def run(plan: DdpPlan, progress: Progress = lambda text: None) -> Report:
    """Train over the plan's two backends, gloo and smddp, alternating.

    Raises:
        JobError: A rank failed.
    """
    progress("building a model per backend and rank")
    report = Report("fsdp", asdict(plan), machine.describe())
    with Job(job_spec(plan, plan.backends, "fsdp", TASK)) as job:
        rounds = rounds_us(job, plan, plan.backends, progress)
        report.measurements = [Measurement(name, us) for name, us in rounds.items()]
        one, other = plan.backends
        report.facts["parameters"] = job.call("parameters")[0]
        apart = job.call("difference", {"one": one, "other": other})
        report.facts["largest_difference"] = max(apart)
    return report


def fsdp_table(report: Report) -> Table:
    """Return a table with one row per backend."""
    s = report.settings
    return render(
        report,
        f"FSDP2 step, {report.facts['parameters'] / 1e6:.0f} M parameters, batch {s['rows']} x "
        f"{s['tokens']}, {s['optimizer']}, {ranks_and_threads(report)}",
        f"medians of {s['rounds']} alternating rounds of {s['steps']} steps; weights differ by "
        f"{report.facts['largest_difference']:.1e} at most afterwards",
        [variant("backend"), milliseconds(1), ROUNDS, faster(report)],
    )
