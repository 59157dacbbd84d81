"""What communication costs a training step: two yardsticks, gloo and smddp in turn, in one job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from rich import box
from rich.table import Table

from sdp_plugins.bench import machine
from sdp_plugins.bench.ddp_yardsticks import NONE, YARDSTICKS
from sdp_plugins.bench.job import Job, JobSpec
from sdp_plugins.bench.runner import Progress
from sdp_plugins.bench.units import format_time

TASK = "sdp_plugins.bench.ddp_task:DdpTask"
WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first
OPTIMIZERS = ("sgd", "adamw")
FULL_MODEL = {"layers": 8, "width": 512, "words": 30522}


@dataclass(frozen=True)
class DdpPlan:
    """What to train, and how often.

    Attributes:
        backends: Compared with no communication, and with the least that DDP can take.
        ranks: Processes.
        threads: Threads of each.
        rounds: Turns of every variant.
        steps: Timed steps in a turn; one more goes before them.
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


@dataclass
class DdpReport:
    """Milliseconds per step of every round, and whether the variants computed the same."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    parameters: int
    rounds_ms: dict[str, list[float]]
    gradients: dict[str, dict[str, Any]]
    ranks_agree: dict[str, bool]

    def step_ms(self, variant: str) -> float:
        """The median over the rounds."""
        return median(self.rounds_ms[variant])

    def share(self, variant: str) -> float:
        """Speed as a share of the speed without communication."""
        return self.step_ms(NONE) / self.step_ms(variant)

    def speedup(self, variant: str) -> float | None:
        """How many times faster than gloo."""
        return self.step_ms("gloo") / self.step_ms(variant) if "gloo" in self.rounds_ms else None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found = {
            variant: {
                "step_ms": round(self.step_ms(variant), 3),
                "share_of_silent_speed": round(self.share(variant), 4),
                "times_gloo": round(s, 4) if (s := self.speedup(variant)) else None,
            }
            for variant in self.rounds_ms
        }
        return {"schema": 1, "operation": "ddp", **asdict(self), "results": found}


def variants(plan: DdpPlan) -> list[str]:
    """In the order of their turns."""
    return [*YARDSTICKS, *plan.backends]


def job_spec(plan: DdpPlan, names: Sequence[str], what: str = "ddp", task: str = TASK) -> JobSpec:
    """The job that trains these variants, by a task that takes `variants` and a `setting`."""
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


def run(plan: DdpPlan, progress: Progress = lambda text: None) -> DdpReport:
    """Train all variants in turn.

    Raises:
        RankError: A rank failed.
    """
    names = variants(plan)
    host = machine.describe()
    progress("building a model per variant and rank")
    with Job(job_spec(plan, names)) as job:
        rounds = rounds_ms(job, plan, names, progress)
        return DdpReport(
            settings=asdict(plan),
            machine=host,
            parameters=job.call("describe")[0]["parameters"],
            rounds_ms=rounds,
            gradients=_compare(job, plan),
            ranks_agree={name: _agree(job, name) for name in plan.backends},
        )


def rounds_ms(
    job: Job, plan: DdpPlan, names: Sequence[str], progress: Progress
) -> dict[str, list[float]]:
    """Per variant and round, after warming up: the median over steps of the mean over ranks."""
    for name in names:
        progress(f"warming up {name}")
        job.call("train", {"variant": name, "steps": WARM_UP_STEPS})
    rounds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(plan.rounds):
        for name in names:
            progress(f"round {number + 1} of {plan.rounds}: {name}")
            ranks = job.call("train", {"variant": name, "steps": plan.steps + 1})
            steps = [fmean(step) for step in zip(*ranks, strict=True)]
            rounds[name].append(1e3 * median(steps[1:]))
    return rounds


def _compare(job: Job, plan: DdpPlan) -> dict[str, dict[str, Any]]:
    """Every backend's gradients and weights against the first one's; the worst rank counts.

    Taken after the last round: weights that are equal then were equal at every step.
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


def ddp_table(report: DdpReport) -> Table:
    """One row per variant."""
    s = report.settings
    table = Table(
        title=f"DDP step, {report.parameters / 1e6:.0f} M parameters, batch {s['rows']} x "
        f"{s['tokens']}, {s['optimizer']}, {s['ranks']} ranks, {s['threads']} thread each",
        caption=f"medians of {s['rounds']} alternating rounds of {s['steps']} steps",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("communication", no_wrap=True)
    for name in ("ms/step", "rounds", "speed\nof none", "x gloo"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("gradients", no_wrap=True)
    for name, rounds in report.rounds_ms.items():
        faster = report.speedup(name)
        table.add_row(
            name,
            f"{report.step_ms(name):.1f}",
            f"{format_time(1e3 * min(rounds))} - {format_time(1e3 * max(rounds))}",
            f"{report.share(name):.1%}",
            f"{faster:.2f}" if faster and name != NONE else "-",
            _verdict(report, name),
        )
    return table


def _verdict(report: DdpReport, name: str) -> str:
    """What is known about a variant's gradients and weights."""
    if name in YARDSTICKS:
        return ""
    words = [] if report.ranks_agree[name] else ["RANKS DIFFER"]
    if found := report.gradients.get(name):
        first = report.settings["backends"][0]
        if found["bitwise_equal"]:
            words.append(f"bitwise those of {first}")
        else:
            share = found["largest_difference"] / found["largest_gradient"]
            words.append(f"within {share:.1e} of {first}'s largest")
    return ", ".join(words) or "the ranks agree"
