"""The cost of communication in a training step: gloo, smddp and two references in one job."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from benchmarks import machine
from benchmarks.ddp_variants import NO_COMM, REFERENCES
from benchmarks.job import Job, JobSpec
from benchmarks.results import Measurement, Progress, Report, alternate, step_us
from benchmarks.table import (
    ROUNDS,
    Column,
    faster,
    milliseconds,
    ranks_and_threads,
    render,
    variant,
)

TASK = "benchmarks.ddp_task:DdpTask"
WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first step
COUNTED_TURNS, COUNTED_STEPS = 5, 3
OPTIMIZERS = ("sgd", "adamw")
FULL_MODEL = {"layers": 8, "width": 512, "words": 30522}


@dataclass(frozen=True)
class DdpPlan:
    """The settings of the `ddp` benchmark.

    Attributes:
        backends: The backends, compared with no communication and with DDP's lower bound.
        ranks: Number of processes.
        threads: Threads per process.
        rounds: Turns of every variant.
        steps: Timed steps in a turn; one untimed step precedes them.
        rows: Sequences per rank and step.
        tokens: Length of a sequence.
        optimizer: "sgd" or "adamw"; its step is part of the time.
        bucket_view: DDP's gradient_as_bucket_view.
        model: Arguments of `bert.Bert`.
    """

    backends: tuple[str, ...] = ("gloo", "smddp")
    ranks: int = 2
    threads: int = 1
    rounds: int = 7
    steps: int = 3
    rows: int = 1
    tokens: int = 64
    optimizer: str = "sgd"
    bucket_view: bool = False
    model: dict[str, int] = field(default_factory=lambda: dict(FULL_MODEL))


def variants(plan: DdpPlan) -> list[str]:
    """Return the variants in the order of their turns."""
    return [*REFERENCES, *plan.backends]


def job_spec(plan: DdpPlan, names: Sequence[str], what: str = "ddp", task: str = TASK) -> JobSpec:
    """Return a job for these variants and a task that accepts `variants` and a `setting`."""
    setting = {
        name: getattr(plan, name)
        for name in ("rows", "tokens", "optimizer", "bucket_view", "model")
    }
    return JobSpec(
        name=f"{what} " + "+".join(names),
        task=task,
        arguments={"variants": list(names), "setting": setting},
        ranks=plan.ranks,
        threads=plan.threads,
    )


def run(plan: DdpPlan, progress: Progress = lambda text: None) -> Report:
    """Train all variants, alternating.

    Raises:
        JobError: A rank failed.
    """
    report = Report("ddp", asdict(plan), machine.describe())
    progress("building a model per variant and rank")
    with Job(job_spec(plan, variants(plan))) as job:
        rounds = rounds_us(job, plan, variants(plan), progress)
        report.facts["parameters"] = job.call("describe")[0]["parameters"]
        spent = {name: _processor_ms(job, name) for name in rounds}
        differences = _compare(job, plan)
        for name, us in rounds.items():
            facts: dict[str, Any] = {"gradients": differences.get(name), **spent[name]}
            if name in plan.backends:
                facts["ranks_agree"] = _agree(job, name)
            report.measurements.append(Measurement(name, us, facts=facts))
    return report


def rounds_us(
    job: Job, plan: DdpPlan, names: Sequence[str], progress: Progress
) -> dict[str, tuple[float, ...]]:
    """Return the microseconds of a step in every round, after warming up."""
    for name in names:
        progress(f"warming up {name}")
        job.call("train", {"variant": name, "steps": WARM_UP_STEPS})

    def turn(name: str) -> float:
        return step_us(job.call("train", {"variant": name, "steps": plan.steps + 1}), warm_up=1)

    return alternate(names, plan.rounds, turn, progress)


def _processor_ms(job: Job, name: str) -> dict[str, float]:
    """Return the processor time of a step, in milliseconds of the median rank and turn."""
    turns = [
        rank
        for _ in range(COUNTED_TURNS)
        for rank in job.call("processor_seconds", {"variant": name, "steps": COUNTED_STEPS})
    ]
    engine, script = (statistics.median(each) * 1e3 for each in zip(*turns, strict=True))
    return {"engine_ms": engine, "script_ms": script}


def _compare(job: Job, plan: DdpPlan) -> dict[str, dict[str, Any]]:
    """Compare every backend's gradients and weights with the first one's; the worst rank counts.

    The comparison follows the last round: weights that are equal then were equal at every step.
    """
    reference, *others = plan.backends
    return {
        other: max(
            job.call("compare", {"one": reference, "other": other}),
            key=lambda found: (not found["bitwise_equal"], found["largest_difference"]),
        )
        for other in others
    }


def _agree(job: Job, variant: str) -> bool:
    return len(set(job.call("fingerprint", {"variant": variant}))) == 1


def share(report: Report, m: Measurement) -> float:
    """Return a variant's speed as a share of the speed without communication."""
    return report.us(NO_COMM, **m.case) / m.us


def ddp_table(report: Report) -> Table:
    """Return a table with one row per variant."""
    s = report.settings
    return render(
        report,
        f"DDP step, {report.facts['parameters'] / 1e6:.0f} M parameters, batch {s['rows']} x "
        f"{s['tokens']}, {s['optimizer']}, {ranks_and_threads(report)}",
        f"medians of {s['rounds']} alternating rounds of {s['steps']} steps",
        [
            variant("communication"),
            milliseconds(1),
            ROUNDS,
            Column("script's\nprocessor ms", lambda m: f"{m.facts['script_ms']:.1f}"),
            Column("engine's", lambda m: f"{m.facts['engine_ms']:.1f}"),
            Column("speed\nof no_comm", lambda m: f"{share(report, m):.1%}"),
            faster(report, but=[NO_COMM]),
            Column("gradients", lambda m: _verdict(report, m), number=False),
        ],
    )


def _verdict(report: Report, m: Measurement) -> str:
    """Return the result of comparing a variant's gradients and weights."""
    if m.variant in REFERENCES:
        return ""
    words = [] if m.facts["ranks_agree"] else ["RANKS DIFFER"]
    if found := m.facts["gradients"]:
        first = report.settings["backends"][0]
        if found["bitwise_equal"]:
            words.append(f"bitwise those of {first}")
        else:
            apart = found["largest_difference"] / found["largest_gradient"]
            words.append(f"within {apart:.1e} of {first}'s largest")
    return ", ".join(words) or "the ranks agree"
