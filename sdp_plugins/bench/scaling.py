"""Training across nodes of a laboratory: what communication leaves of the speed of computing alone.

All variants train in turns, at a speed of the links at which gloo's communication is 30 to 60 % of
its step: where it is next to nothing, or nearly everything, all backends would look alike.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sdp_plugins.bench import machine
from sdp_plugins.bench.cluster.network import Network
from sdp_plugins.bench.ddp import WARM_UP_STEPS, DdpReport
from sdp_plugins.bench.ddp_yardsticks import NONE
from sdp_plugins.bench.mpi import MpiInstall
from sdp_plugins.bench.nodes import Layout, payload
from sdp_plugins.bench.runner import Progress
from sdp_plugins.bench.scaling_crew import GLOO, Crew
from sdp_plugins.bench.scaling_plan import ScalingPlan
from sdp_plugins.bench.scaling_speed import Trial, search

WARM_UP_GBIT = 1.0
SEARCH_STEPS = 3
ITEMSIZE = 4  # of a gradient's element


@dataclass(frozen=True)
class Row:
    """One model in one layout.

    Attributes:
        gradients: How many tensors of them a step has.
        found: The variants' times, and what they computed.
    """

    model: str
    layout: Layout
    gbit: float
    gradients: int
    found: DdpReport

    @property
    def trial(self) -> Trial:
        """The share of gloo's communication, by the medians of all rounds."""
        return Trial(self.gbit, *(self.found.step_ms(name) / 1e3 for name in (NONE, GLOO)))


def run(plan: ScalingPlan, mpi: MpiInstall | None, progress: Progress = lambda text: None) -> Row:
    """Measure one model in one layout.

    Raises:
        RankError: A rank failed.
    """
    where, host = f"{plan.model} on {plan.layout}", machine.describe()
    progress(f"{where}: starting")
    speed = plan.gbit or WARM_UP_GBIT
    with Network(plan.layout.nodes, speed) as network, Crew(plan, mpi, network) as crew:
        progress(f"{where}: warming up")
        first = crew.turn(WARM_UP_STEPS)
        if plan.gbit is None:
            set_speed(plan.layout, network, crew, first[NONE] / 1e3, progress)
        turns = []
        for number in range(plan.rounds):
            progress(f"{where} at {network.gbit:g} Gbit/s: round {number + 1} of {plan.rounds}")
            order = crew.variants[:: -1 if number % 2 else 1]  # nobody always comes after the same
            turns.append(crew.turn(plan.steps, order))
        gradients, agree = compare(crew)
        found = DdpReport(
            settings=asdict(plan) | {"layout": str(plan.layout)},
            machine=host,
            parameters=crew.size["parameters"],
            rounds_ms={name: [turn[name] for turn in turns] for name in crew.variants},
            gradients=gradients,
            ranks_agree=agree,
        )
        return Row(plan.model, plan.layout, network.gbit, crew.size["gradients"], found)


def set_speed(
    layout: Layout, network: Network, crew: Crew, silent_s: float, progress: Progress
) -> None:
    """Give the links the speed at which gloo's share of its step is as wanted."""

    def attempt(gbit: float) -> Trial:
        progress(f"{layout}: trying {gbit:g} Gbit/s")
        network.set_speed(gbit)
        times = crew.turn(SEARCH_STEPS, [NONE, GLOO])
        return Trial(gbit, times[NONE] / 1e3, times[GLOO] / 1e3)

    sent = payload(layout, ITEMSIZE * crew.size["parameters"])
    network.set_speed(search(attempt, sent, silent_s).gbit)


def compare(crew: Crew) -> tuple[dict[str, dict[str, Any]], dict[str, bool]]:
    """Every backend's gradients against gloo's, and whether its ranks agree.

    Taken after the last round: weights that are equal then were equal at every step.
    """
    gradients, agree = {}, {}
    agree[GLOO], reference = crew.outcome(GLOO)
    for name in crew.variants:
        if name in (NONE, GLOO):
            continue
        agree[name], vector = crew.outcome(name)
        gradients[name] = {
            "bitwise_equal": np.array_equal(vector, reference),
            "largest_difference": float(np.abs(vector - reference).max()),
            "largest_gradient": float(np.abs(reference).max()),
        }
    return gradients, agree
