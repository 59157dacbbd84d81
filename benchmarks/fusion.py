"""The benefit of fusion buffers: a model's gradients fused, one by one, and as one flat buffer."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.table import Table

from benchmarks import machine
from benchmarks.job import Job, JobSpec
from benchmarks.results import Measurement, Progress, Report, alternate, step_us
from benchmarks.table import ROUNDS, Column, faster, milliseconds, render, variant
from benchmarks.units import format_size

TASK = "benchmarks.fusion_task:FusionTask"
WAYS = ("fused", "one by one", "one flat buffer")


@dataclass(frozen=True)
class FusionPlan:
    """The settings of the `fusion` benchmark.

    Attributes:
        layers: Layers of the BERT whose gradients are averaged.
        threshold_bytes: Size of a fusion buffer.
        ranks: Number of processes.
        rounds: Turns of every method.
        steps: Timed steps in a turn; one untimed step precedes them.
    """

    layers: int = 8
    threshold_bytes: int = 25 * 2**20
    ranks: int = 2
    rounds: int = 7
    steps: int = 5


def gradient_counts(layers: int, width: int = 512, words: int = 30522) -> list[int]:
    """Return the sizes of a BERT's gradients in elements, in the order of the backward pass."""
    attention = [3 * width * width, 3 * width, width * width, width]
    feed_forward = [4 * width * width, 4 * width, 4 * width * width, width]
    layer = [*attention, *feed_forward, *4 * [width]]
    embeddings = [words * width, 512 * width, width, width]
    return [words, *reversed(layers * layer), *reversed(embeddings)]


def run(plan: FusionPlan, progress: Progress = lambda text: None) -> Report:
    """Average with all methods, alternating.

    Raises:
        JobError: A rank failed.
    """
    counts = gradient_counts(plan.layers)
    arguments = {"counts": counts, "threshold_bytes": plan.threshold_bytes}
    report = Report("fusion", asdict(plan), machine.describe())
    with Job(JobSpec("fusion", TASK, plan.ranks, arguments)) as job:

        def turn(way: str) -> float:
            return step_us(job.call("run", {"way": way, "steps": plan.steps + 1}), warm_up=1)

        rounds = alternate(WAYS, plan.rounds, turn, progress)
        operations = {"fused": job.call("buffers")[0], "one by one": len(counts)}
    report.facts.update(nbytes=4 * sum(counts), gradients=len(counts))
    for way, us in rounds.items():
        report.measurements.append(
            Measurement(way, us, facts={"operations": operations.get(way, 1)})
        )
    return report


def fusion_table(report: Report) -> Table:
    """Return a table with one row per method."""
    s, nbytes = report.settings, report.facts["nbytes"]
    return render(
        report,
        f"averaging {report.facts['gradients']} gradients, {format_size(nbytes)}, float32, "
        f"{s['ranks']} ranks, buffers of {format_size(s['threshold_bytes'])}",
        f"medians of {s['rounds']} alternating rounds of {s['steps']} steps",
        [
            variant("how"),
            Column("operations", lambda m: str(m.facts["operations"])),
            milliseconds(2),
            ROUNDS,
            Column("GB/s", lambda m: f"{nbytes / m.us / 1e3:.2f}"),
            faster(report, "one by one"),
        ],
    )
