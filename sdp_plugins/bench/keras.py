"""Training with Keras: under the strategy, without communication, and by TensorFlow's own means."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from rich import box
from rich.table import Table

from sdp_plugins.bench import machine
from sdp_plugins.bench.job import Job, JobSpec
from sdp_plugins.bench.runner import Progress
from sdp_plugins.bench.units import format_time

TASK = "sdp_plugins.bench.keras_task:KerasTask"
BACKENDS = ("tensorflow", "torch", "jax")
NONE, OURS, MIRRORED = "none", "smddp", "mwms"


@dataclass(frozen=True)
class KerasPlan:
    """What to train, and how often.

    Attributes:
        backend: Keras' backend.
        ranks: Processes.
        rows: Of the global batch.
        width: Of the hidden layers; 4096 make 38.6 million parameters.
        rounds: Turns of every way.
        steps: Timed steps in a turn; two more go before them.
    """

    backend: str = "tensorflow"
    ranks: int = 2
    rows: int = 16
    width: int = 4096
    rounds: int = 5
    steps: int = 8


@dataclass
class KerasReport:
    """Milliseconds per step of every round."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    parameters: int
    rounds_ms: dict[str, list[float]]

    def step_ms(self, way: str) -> float:
        """The median over the rounds."""
        return median(self.rounds_ms[way])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found = {way: round(self.step_ms(way), 3) for way in self.rounds_ms}
        return {"schema": 1, "operation": "keras", **asdict(self), "step_ms": found}


def run(plan: KerasPlan, progress: Progress = lambda text: None) -> KerasReport:
    """Train in all ways in turn.

    Raises:
        RankError: A rank failed.
    """
    host = machine.describe()
    ours = {"backend": plan.backend, "width": plan.width, "rows": plan.rows, "workers": []}
    specs = {OURS: JobSpec("keras", TASK, plan.ranks, ours)}
    if plan.backend == "tensorflow" and plan.ranks > 1:
        mirrored = {**ours, "workers": _addresses(plan.ranks)}
        specs[MIRRORED] = JobSpec("mwms", TASK, plan.ranks, mirrored)
    ways = [NONE, *specs]
    rounds: dict[str, list[float]] = {way: [] for way in ways}
    with ExitStack() as stack:
        progress("starting")
        jobs = {name: stack.enter_context(Job(spec)) for name, spec in specs.items()}
        jobs[NONE] = jobs[OURS]
        parameters = jobs[OURS].call("parameters")[0]
        for number in range(plan.rounds):
            for way in ways:
                progress(f"round {number + 1} of {plan.rounds}: {way}")
                ranks = jobs[way].call("run", {"way": way, "steps": plan.steps})
                rounds[way].append(1e3 * median(fmean(step) for step in zip(*ranks, strict=True)))
    return KerasReport(asdict(plan), host, parameters, rounds)


def keras_table(report: KerasReport) -> Table:
    """One row per way."""
    s = report.settings
    table = Table(
        title=f"Keras on {s['backend']}: a step of {report.parameters / 1e6:.1f} M parameters, "
        f"{s['ranks']} ranks, global batch of {s['rows']}",
        caption=f"medians of {s['rounds']} alternating rounds of {s['steps']} steps; none: every "
        "rank trains its own model with its part of the batch",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("way", no_wrap=True)
    for name in ("ms/step", "rounds", "x none", "x mwms"):
        table.add_column(name, justify="right", no_wrap=True)
    for way, rounds in report.rounds_ms.items():
        ms = report.step_ms(way)
        mirrored = f"{ms / report.step_ms(MIRRORED):.2f}" if MIRRORED in report.rounds_ms else "-"
        table.add_row(
            way,
            f"{ms:.0f}",
            f"{format_time(1e3 * min(rounds))} - {format_time(1e3 * max(rounds))}",
            f"{ms / report.step_ms(NONE):.2f}",
            mirrored,
        )
    return table


def _addresses(count: int) -> list[str]:
    """Ports of this host that were free a moment ago."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    return addresses
