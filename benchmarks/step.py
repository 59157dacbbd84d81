"""A training step by every way of data parallelism on CPUs, and without, alternating in one job."""

from __future__ import annotations

from dataclasses import asdict, replace

from rich.table import Table

from benchmarks import machine
from benchmarks.ddp import WARM_UP_STEPS, DdpPlan, job_spec, rounds_us
from benchmarks.job import Job
from benchmarks.results import Measurement, Progress, Report
from benchmarks.table import (
    ROUNDS,
    Column,
    milliseconds,
    ranks_and_threads,
    render,
    variant,
)

TASK = "benchmarks.step_task:StepTask"
VARIANTS = ("none", "lower_bound", "gloo", "smddp", "zero", "fsdp2", "sharded")
OPTIMIZERS = ("sgd", "adamw", "fused_adamw")
REFERENCE = "none"
SAME_WEIGHTS = ("smddp", "sharded")


def run(plan: DdpPlan, progress: Progress = lambda text: None) -> Report:
    """Train by each of the plan's `backends`, which are names in `VARIANTS`, alternating.

    Raises:
        JobError: A rank failed.
    """
    report = Report("step", asdict(plan), machine.describe())
    memory = {name: _memory(plan, name, progress) for name in plan.backends}
    alone = _memory(replace(plan, ranks=1), REFERENCE, progress)
    with Job(job_spec(plan, plan.backends, "step", TASK)) as job:
        rounds = rounds_us(job, plan, plan.backends, progress)
        for name, us in rounds.items():
            facts: dict[str, object] = {"memory": memory[name] / alone}
            if name in SAME_WEIGHTS:
                facts["weights"] = sorted(set(job.call("fingerprint", {"variant": name})))
            report.measurements.append(Measurement(name, us, facts=facts))
    return report


def _memory(plan: DdpPlan, name: str, progress: Progress) -> int:
    """Return the bytes by which training has made all ranks grow: pages that two map count once."""
    progress(f"memory of {name} with {plan.ranks} ranks")
    with Job(job_spec(plan, [name], "step", TASK)) as job:
        before = sum(rank.pss for rank in job.call("footprint"))
        job.call("train", {"variant": name, "steps": WARM_UP_STEPS})
        return sum(rank.pss for rank in job.call("footprint")) - before


def step_table(report: Report) -> Table:
    """Return a table with one row per variant."""
    s = report.settings
    return render(
        report,
        f"training step, batch {s['rows']} x {s['tokens']} per rank, {s['optimizer']}, "
        f"{ranks_and_threads(report)}",
        f"medians of {s['rounds']} alternating rounds of {s['steps']} steps; memory of all ranks "
        "between steps, Pss, as a multiple of one process without data parallelism",
        [
            variant("data parallelism"),
            milliseconds(1),
            ROUNDS,
            Column("time of\nnone", lambda m: f"{m.us / report.us(REFERENCE):.2f} x"),
            Column("memory of\none process", lambda m: f"{m.facts['memory']:.2f} x"),
            Column("weights", lambda m: _verdict(report, m), number=False),
        ],
    )


def _verdict(report: Report, m: Measurement) -> str:
    """Return the result of comparing the weights of DDP and of shards."""
    if "weights" not in m.facts:
        return ""
    if len(m.facts["weights"]) > 1:
        return "RANKS DIFFER"
    others = [other for other in report.measurements if "weights" in other.facts]
    if m is others[0] or len(others) == 1:
        return "all ranks alike"
    equal = m.facts["weights"] == others[0].facts["weights"]
    return f"{'bitwise' if equal else 'NOT bitwise'} those of {others[0].variant}"
