"""Every collective of torch.distributed over smddp and over gloo, in turn and in one job."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from sdp_plugins.bench import machine
from sdp_plugins.bench.job import Job, JobSpec
from sdp_plugins.bench.runner import CALLS_PER_ROUND, Progress, condense
from sdp_plugins.bench.units import format_size, format_time

TASK = "sdp_plugins.bench.collectives_task:CollectivesTask"
BACKENDS = ("gloo", "smddp")
OPERATIONS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "send_and_receive",
    "barrier",
)
NO_BYTES = ("barrier",)


@dataclass(frozen=True)
class CollectivesPlan:
    """What to measure, and how often.

    Attributes:
        operations: Of OPERATIONS.
        nbytes: Sizes of what a rank gives.
        ranks: Processes.
        threads: Threads of each.
        rounds: Turns of each backend.
        round_s: About how long a turn lasts.
    """

    operations: tuple[str, ...] = OPERATIONS
    nbytes: tuple[int, ...] = (4096, 2**20, 25 * 2**20)
    ranks: int = 2
    threads: int = 1
    rounds: int = 7
    round_s: float = 0.1


@dataclass(frozen=True)
class Cell:
    """One operation and size: microseconds of a call in every round, by backend."""

    operation: str
    nbytes: int
    rounds_us: dict[str, list[float]]

    def latency_us(self, backend: str) -> float:
        """The median over the rounds."""
        return median(self.rounds_us[backend])

    @property
    def times_gloo(self) -> float:
        """How many times faster smddp is."""
        return self.latency_us("gloo") / self.latency_us("smddp")


@dataclass
class CollectivesReport:
    """All cells of a run, and on what they were taken."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found = [{**asdict(cell), "times_gloo": round(cell.times_gloo, 3)} for cell in self.cells]
        return {
            "schema": 1,
            "operation": "collectives",
            "settings": self.settings,
            "machine": self.machine,
            "cells": found,
        }


def run(plan: CollectivesPlan, progress: Progress = lambda text: None) -> CollectivesReport:
    """Measure a plan.

    Raises:
        RankError: A rank failed.
    """
    report = CollectivesReport(asdict(plan), machine.describe())
    with Job(_spec(plan)) as job:
        for operation in plan.operations:
            for nbytes in plan.nbytes[:1] if operation in NO_BYTES else plan.nbytes:
                progress(f"{operation}, {format_size(nbytes)}")
                report.cells.append(_measure(job, plan, operation, nbytes))
    return report


def _spec(plan: CollectivesPlan) -> JobSpec:
    return JobSpec(
        name="collectives",
        task=TASK,
        arguments={"backends": list(BACKENDS)},
        ranks=plan.ranks,
        threads=plan.threads,
    )


def _measure(job: Job, plan: CollectivesPlan, operation: str, nbytes: int) -> Cell:
    job.call("prepare", {"operation": operation, "nbytes": nbytes})
    few, many = CALLS_PER_ROUND
    calls = {}
    for backend in BACKENDS:
        ranks = job.call("burst", {"backend": backend, "iterations": few})
        seconds = condense(ranks) / 1e6
        calls[backend] = min(many, max(few, int(plan.round_s / seconds)))
    rounds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for _ in range(plan.rounds):
        for backend in BACKENDS:
            ranks = job.call("burst", {"backend": backend, "iterations": calls[backend]})
            rounds[backend].append(condense(ranks))
    return Cell(operation, nbytes, rounds)


def collectives_table(report: CollectivesReport) -> Table:
    """One row per operation and size."""
    settings, host = report.settings, report.machine
    table = Table(
        title=f"torch.distributed, {settings['ranks']} ranks, {settings['threads']} thread each, "
        f"{host['cpu']}, {host['cores']} cores",
        caption=f"medians of {settings['rounds']} alternating rounds; GB/s: of what a rank gives; "
        "float32 tensors that are not shared; send_and_receive: there and back",
        box=box.SIMPLE_HEAD,
    )
    for name in ("operation", "a rank gives"):
        table.add_column(name, no_wrap=True)
    for name in ("gloo", "smddp", "smddp\nrounds", "smddp\nGB/s", "x gloo"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in report.cells:
        smddp = cell.rounds_us["smddp"]
        moves = cell.operation not in NO_BYTES
        table.add_row(
            cell.operation,
            format_size(cell.nbytes) if moves else "",
            format_time(cell.latency_us("gloo")),
            format_time(cell.latency_us("smddp")),
            f"{format_time(min(smddp))} - {format_time(max(smddp))}",
            f"{cell.nbytes / cell.latency_us('smddp') / 1e3:.3g}" if moves else "",
            f"{cell.times_gloo:.2f}",
        )
    return table
