"""Measures steps and bytes at each speed of the links, and the loss after so many steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from operator import truediv
from statistics import fmean, median
from typing import Any

from benchmarks import machine
from benchmarks.job import Job, JobSpec
from benchmarks.results import Progress
from benchmarks.slow import rounding
from benchmarks.slow.names import BERT, EVERY, LANGUAGE, LOCAL, NOW_AND_THEN, TURN, WARM_UP
from benchmarks.testbed import start
from benchmarks.testbed.network import Network

TASK = "benchmarks.slow.task:SlowTask"
FAST_GBIT = 20.0
POINTS = 10
"""Evaluations of a training."""


@dataclass(frozen=True)
class SlowPlan:
    """The settings.

    Attributes:
        nodes: Number of nodes, with a rank each.
        mbit: Speeds of the links, in 1e6 bits/s.
        models: Of `MODELS`; only the language model's loss is measured.
        variants: Of `NAMES`.
        rounds: Turns of every variant.
        steps: Timed steps in a turn.
        loss_steps: Steps of the language model.
        seeds: Trainings of each variant.
    """

    nodes: int
    mbit: tuple[float, ...]
    models: tuple[str, ...]
    variants: tuple[str, ...]
    rounds: int = 3
    steps: int = 2
    loss_steps: int = 2000
    seeds: int = 3


@dataclass
class SlowReport:
    """What was measured.

    Attributes:
        step_s: Seconds of a step by model, speed and variant, one value for each turn.
        sent: Bytes of a step on the busiest link, headers and all, by model, speed and variant.
        losses: By variant, for each seed the losses on text that was held out, from the beginning
            to the end.
        parameters: Number of parameters by model.
        rounding_s: As of `rounding.measure`.
    """

    plan: SlowPlan
    step_s: dict[str, dict[float, dict[str, list[float]]]] = field(default_factory=dict)
    sent: dict[str, dict[float, dict[str, float]]] = field(default_factory=dict)
    losses: dict[str, list[list[float]]] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    rounding_s: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"operation": "slow", "machine": machine.describe(), **asdict(self)}

    @property
    def points(self) -> list[int]:
        """The steps after which losses were taken."""
        return [self.plan.loss_steps * point // POINTS for point in range(POINTS + 1)]

    def loss(self, variant: str, point: int = -1) -> float:
        """The mean of the seeds' losses at one of `points`."""
        return fmean(losses[point] for losses in self.losses[variant])

    def median_s(self, model: str, mbit: float, variant: str) -> float:
        """The median time of a step."""
        return median(self.step_s[model][mbit][variant])

    def speed(self, model: str, mbit: float, variant: str, reference: str) -> float | None:
        """How many times as fast as another variant: the median of the rounds; None: not known."""
        times = self.step_s[model][mbit]
        if reference not in times:
            return None
        return median(map(truediv, times[reference], times[variant]))


def run(plan: SlowPlan, progress: Progress = lambda text: None) -> SlowReport:
    """Measure everything.

    Raises:
        JobError: A rank failed.
    """
    report = SlowReport(plan, rounding_s=rounding.measure())
    with Network(plan.nodes, FAST_GBIT) as network:
        spec = JobSpec(
            name="slow",
            task=TASK,
            ranks=plan.nodes,
            environment={"SDP_INTERNODE": "gloo"},
            start=start.on(network),
        )
        with Job(spec) as job:
            for mbit in plan.mbit:
                for model in plan.models:
                    network.set_speed(mbit / 1e3)
                    time_steps(plan, report, model, mbit, job, network, progress)
            network.set_speed(FAST_GBIT)
            for seed in range(plan.seeds if LANGUAGE in plan.models else 0):
                for variant in plan.variants:
                    progress(f"loss of {variant}, seed {seed}")
                    losses = train(job, variant, seed, plan.loss_steps)
                    report.losses.setdefault(variant, []).append(losses)
    return report


def time_steps(
    plan: SlowPlan,
    report: SlowReport,
    model: str,
    mbit: float,
    job: Job,
    network: Network,
    progress: Progress,
) -> None:
    """Time all variants of a model at one speed, alternating."""
    times: dict[str, list[float]] = {name: [] for name in plan.variants}
    sent: dict[str, float] = {}
    long_turns = NOW_AND_THEN if set(plan.variants) & set(LOCAL) else ()
    for number in range(plan.rounds):
        for variant in plan.variants[:: -1 if number % 2 else 1]:
            progress(f"{model} at {mbit:g} Mbit/s: {variant}, round {number + 1} of {plan.rounds}")
            seed = None if model == BERT else 0
            found = build(job, variant, seed, plan.loss_steps)
            report.parameters[model] = found[0]
            first, steps = (EVERY, TURN) if variant in long_turns else (0, plan.steps)
            # The first exchange of a group connects the ranks; others go on while steps are timed.
            job.call("train", {"steps": WARM_UP + 1 + first})
            seconds = 0.0

            def turn(steps: int = steps) -> None:
                nonlocal seconds
                seconds = max(job.call("train", {"steps": steps}))

            counted = network.count(turn)
            times[variant].append(seconds / steps)
            sent[variant] = max(counted) / steps
            job.call("release", {})
    report.step_s.setdefault(model, {})[mbit] = times
    report.sent.setdefault(model, {})[mbit] = sent


def build(job: Job, variant: str, seed: int | None, steps: int) -> list[int]:
    """Begin a training on all ranks; return their numbers of parameters."""
    return job.call("build", {"variant": variant, "seed": seed, "steps": steps})


def train(job: Job, variant: str, seed: int, steps: int) -> list[float]:
    """Return the losses of a training of the language model."""
    build(job, variant, seed, steps)
    losses = [job.call("loss", {})[0]]
    for point in range(POINTS):
        for _ in range(steps // POINTS // 50):  # a command has a deadline
            job.call("train", {"steps": 50})
        job.call("train", {"steps": steps // POINTS % 50})
        if point == POINTS - 1:
            job.call("finish", {})
        losses.append(fmean(job.call("loss", {})))
    job.call("release", {})
    return losses


def known(names: Sequence[str], all_names: Sequence[str]) -> tuple[str, ...]:
    """Validate names of models or variants.

    Raises:
        ValueError: There is no such name.
    """
    for name in names:
        if name not in all_names:
            raise ValueError(f"unknown {name!r}; there are {', '.join(all_names)}")
    return tuple(names)
