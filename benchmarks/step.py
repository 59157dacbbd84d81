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
from benchmarks.testbed import start
from benchmarks.testbed.network import Network

TASK = "benchmarks.step_task:StepTask"
VARIANTS = ("none", "lower_bound", "gloo", "smddp", "direct", "zero", "fsdp2", "sharded")
OPTIMIZERS = ("sgd", "adamw", "fused_adamw", "adafactor", "muon")
REFERENCE = "none"
SAME_WEIGHTS = ("smddp", "direct", "sharded")
COUNTED_STEPS = 2


def run(
    plan: DdpPlan, progress: Progress = lambda text: None, network: Network | None = None
) -> Report:
    """Train by each of the plan's `backends`, which are names in `VARIANTS`, alternating.

    Args:
        plan: The settings.
        progress: Shows what is being done.
        network: The nodes of a testbed, which have equally many ranks each; None: this machine.

    Raises:
        JobError: A rank failed.
    """
    report = Report("step", asdict(plan), machine.describe())
    report.facts["nodes"] = network.nodes if network else 1
    report.facts["gbit"] = network.gbit if network else None
    used = memory(plan, progress) if network is None else {}
    spec = job_spec(plan, plan.backends, "step", TASK)
    if network is not None:
        across = {"SDP_INTERNODE": "gloo"}
        spec = replace(spec, start=start.on(network), environment=across)
    with Job(spec) as job:
        rounds = rounds_us(job, plan, plan.backends, progress)
        for name, us in rounds.items():
            facts: dict[str, object] = {"memory": used.get(name)}
            if network is not None:
                facts["sent"] = _sent(job, name, network)
            if name in SAME_WEIGHTS:
                facts["weights"] = sorted(set(job.call("fingerprint", {"variant": name})))
            report.measurements.append(Measurement(name, us, facts=facts))
    return report


def memory(plan: DdpPlan, progress: Progress) -> dict[str, float]:
    """Return the memory of all ranks by variant, in multiples of one process's."""
    used = {name: _memory(plan, name, progress) for name in plan.backends}
    alone = _memory(replace(plan, ranks=1), REFERENCE, progress)
    return {name: nbytes / alone for name, nbytes in used.items()}


def _memory(plan: DdpPlan, name: str, progress: Progress) -> int:
    """Return the bytes by which training has made all ranks grow: pages that two map count once."""
    progress(f"memory of {name} with {plan.ranks} ranks")
    with Job(job_spec(plan, [name], "step", TASK)) as job:
        before = sum(rank.pss for rank in job.call("footprint"))
        job.call("train", {"variant": name, "steps": WARM_UP_STEPS})
        return sum(rank.pss for rank in job.call("footprint")) - before


def _sent(job: Job, name: str, network: Network) -> float:
    """Return the bytes of a step on the busiest link and direction, in multiples of the model."""
    training = {"variant": name, "steps": COUNTED_STEPS}
    most = max(network.count(lambda: job.call("train", training)))
    return most / COUNTED_STEPS / job.call("model_nbytes", {"variant": name})[0]


def step_table(report: Report) -> Table:
    """Return a table with one row per variant."""
    s, nodes = report.settings, report.facts["nodes"]
    if nodes == 1:
        cost = Column("memory of\none process", lambda m: f"{m.facts['memory']:.2f} x")
        about = (
            "memory of all ranks between steps, Pss, as a multiple of one process without data "
            "parallelism"
        )
    else:
        cost = Column("sent", lambda m: f"{m.facts['sent']:.3f} x")
        about = "sent: bytes of the busiest link in a step, as a multiple of the gradients"
    across = f"{nodes} nodes at {report.facts['gbit']:g} Gbit/s, " if nodes > 1 else ""
    return render(
        report,
        f"training step, batch {s['rows']} x {s['tokens']} per rank, {s['optimizer']}, {across}"
        f"{ranks_and_threads(report)}",
        f"medians of {s['rounds']} alternating rounds of {s['steps']} steps; {about}",
        [
            variant("data parallelism"),
            milliseconds(1),
            ROUNDS,
            Column("time of\nnone", lambda m: f"{m.us / report.us(REFERENCE):.2f} x"),
            cost,
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
