"""Training across nodes of a testbed, relative to the speed without communication.

All variants alternate, at the link speed at which gloo's communication is 30 to 60 % of its step.
If it were close to 0 or 100 %, all backends would appear equal.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.ddp import WARM_UP_STEPS
from benchmarks.ddp_variants import NO_COMM
from benchmarks.mpi import MpiInstall
from benchmarks.nodes import Layout, payload
from benchmarks.results import Measurement, Progress, Report
from benchmarks.scaling.jobs import GLOO, VariantJobs
from benchmarks.scaling.link_speed import Trial, search
from benchmarks.scaling.plan import ScalingPlan
from benchmarks.testbed.network import Network

WARM_UP_GBIT = 1.0
SEARCH_STEPS = 3
ITEMSIZE = 4  # bytes of a gradient's element


@dataclass(frozen=True)
class Row:
    """One model in one layout.

    Attributes:
        gradients: Number of gradient tensors in a step.
        found: The variants' times and results.
    """

    model: str
    layout: Layout
    gbit: float
    gradients: int
    found: Report

    @property
    def trial(self) -> Trial:
        """The share of gloo's communication, from the medians of all rounds."""
        return Trial(self.gbit, *(self.found.us(name) / 1e6 for name in (NO_COMM, GLOO)))


def run(plan: ScalingPlan, mpi: MpiInstall | None, progress: Progress = lambda text: None) -> Row:
    """Measure one model in one layout.

    Raises:
        JobError: A rank failed.
    """
    where, host = f"{plan.model} on {plan.layout}", machine.describe()
    progress(f"{where}: starting")
    speed = plan.gbit or WARM_UP_GBIT
    with Network(plan.layout.nodes, speed) as network, VariantJobs(plan, mpi, network) as jobs:
        progress(f"{where}: warming up")
        first = jobs.turn(WARM_UP_STEPS)
        if plan.gbit is None:
            set_speed(plan.layout, network, jobs, first[NO_COMM] / 1e6, progress)
        turns = []
        for number in range(plan.rounds):
            progress(f"{where} at {network.gbit:g} Gbit/s: round {number + 1} of {plan.rounds}")
            order = jobs.variants[:: -1 if number % 2 else 1]  # alternates which variant runs first
            turns.append(jobs.turn(plan.steps, order))
        found = Report("scaling", asdict(plan) | {"layout": str(plan.layout)}, host)
        found.facts["parameters"] = jobs.size["parameters"]
        facts = compare(jobs)
        for name in jobs.variants:
            us = tuple(turn[name] for turn in turns)
            found.measurements.append(Measurement(name, us, facts=facts[name]))
        return Row(plan.model, plan.layout, network.gbit, jobs.size["gradients"], found)


def set_speed(
    layout: Layout, network: Network, jobs: VariantJobs, no_comm_s: float, progress: Progress
) -> None:
    """Set the links to the speed at which gloo's communication has the wanted share."""

    def attempt(gbit: float) -> Trial:
        progress(f"{layout}: trying {gbit:g} Gbit/s")
        network.set_speed(gbit)
        times = jobs.turn(SEARCH_STEPS, [NO_COMM, GLOO])
        return Trial(gbit, times[NO_COMM] / 1e6, times[GLOO] / 1e6)

    sent = payload(layout, ITEMSIZE * jobs.size["parameters"])
    network.set_speed(search(attempt, sent, no_comm_s).gbit)


def compare(jobs: VariantJobs) -> dict[str, dict[str, Any]]:
    """Compare every backend's gradients with gloo's, and the ranks of each backend.

    The comparison follows the last round: weights that are equal then were equal at every step.
    """
    facts: dict[str, dict[str, Any]] = {name: {} for name in jobs.variants}
    facts[GLOO]["ranks_agree"], reference = jobs.outcome(GLOO)
    for name in jobs.variants:
        if name in (NO_COMM, GLOO):
            continue
        facts[name]["ranks_agree"], vector = jobs.outcome(name)
        facts[name]["gradients"] = {
            "bitwise_equal": np.array_equal(vector, reference),
            "largest_difference": float(np.abs(vector - reference).max()),
            "largest_gradient": float(np.abs(reference).max()),
        }
    return facts
