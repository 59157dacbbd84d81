"""What fusion buffers are worth: a model's gradients fused, one by one, and as one flat buffer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from rich import box
from rich.table import Table

from sdp_plugins.bench import machine
from sdp_plugins.bench.job import Job, JobSpec
from sdp_plugins.bench.runner import Progress
from sdp_plugins.bench.units import format_size, format_time

TASK = "sdp_plugins.bench.fusion_task:FusionTask"
WAYS = ("fused", "one by one", "one flat buffer")


@dataclass(frozen=True)
class FusionPlan:
    """What to average, and how often.

    Attributes:
        layers: Of the BERT whose gradients these are.
        threshold_bytes: Size of a fusion buffer.
        ranks: Processes.
        rounds: Turns of every way.
        steps: Timed steps in a turn; one more goes before them.
    """

    layers: int = 8
    threshold_bytes: int = 25 * 2**20
    ranks: int = 2
    rounds: int = 7
    steps: int = 5


@dataclass
class FusionReport:
    """Milliseconds per step of every round."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    nbytes: int
    gradients: int
    buffers: int
    rounds_ms: dict[str, list[float]]

    def step_ms(self, way: str) -> float:
        """The median over the rounds."""
        return median(self.rounds_ms[way])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found = {way: round(self.step_ms(way), 3) for way in self.rounds_ms}
        return {"schema": 1, "operation": "fusion", **asdict(self), "step_ms": found}


def gradient_counts(layers: int, width: int = 512, words: int = 30522) -> list[int]:
    """Elements of a BERT's gradients, last layer first, as a backward pass yields them."""
    attention = [3 * width * width, 3 * width, width * width, width]
    feed_forward = [4 * width * width, 4 * width, 4 * width * width, width]
    layer = [*attention, *feed_forward, *4 * [width]]
    embeddings = [words * width, 512 * width, width, width]
    return [words, *reversed(layers * layer), *reversed(embeddings)]


def run(plan: FusionPlan, progress: Progress = lambda text: None) -> FusionReport:
    """Average in all ways in turn.

    Raises:
        RankError: A rank failed.
    """
    counts = gradient_counts(plan.layers)
    arguments = {"counts": counts, "threshold_bytes": plan.threshold_bytes}
    host = machine.describe()
    rounds: dict[str, list[float]] = {way: [] for way in WAYS}
    with Job(JobSpec("fusion", TASK, plan.ranks, arguments)) as job:
        for number in range(plan.rounds):
            for way in WAYS:
                progress(f"round {number + 1} of {plan.rounds}: {way}")
                ranks = job.call("run", {"way": way, "steps": plan.steps + 1})
                steps = [fmean(step) for step in zip(*ranks, strict=True)]
                rounds[way].append(1e3 * median(steps[1:]))
        buffers = job.call("buffers")[0]
    return FusionReport(asdict(plan), host, 4 * sum(counts), len(counts), buffers, rounds)


def fusion_table(report: FusionReport) -> Table:
    """One row per way."""
    s = report.settings
    table = Table(
        title=f"averaging {report.gradients} gradients, {format_size(report.nbytes)}, float32, "
        f"{s['ranks']} ranks, buffers of {format_size(s['threshold_bytes'])}",
        caption=f"medians of {s['rounds']} alternating rounds of {s['steps']} steps",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("how", no_wrap=True)
    for name in ("operations", "ms/step", "rounds", "GB/s", "x one by one"):
        table.add_column(name, justify="right", no_wrap=True)
    operations = {"fused": report.buffers, "one by one": report.gradients}
    for way, rounds in report.rounds_ms.items():
        ms = report.step_ms(way)
        table.add_row(
            way,
            str(operations.get(way, 1)),
            f"{ms:.2f}",
            f"{format_time(1e3 * min(rounds))} - {format_time(1e3 * max(rounds))}",
            f"{report.nbytes / ms / 1e6:.2f}",
            f"{report.step_ms('one by one') / ms:.2f}",
        )
    return table
