"""Kills ranks of trainings by each way to go on, in turns."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks import machine
from benchmarks.recovery.launch import TORCHELASTIC, TORCHFT, VARIANTS, Launch, Training, missing
from benchmarks.recovery.timing import Recovery, recovery, step_us, steps_together
from benchmarks.results import Measurement, Progress, Report
from benchmarks.table import Column, render, variant

CALM_S = 3.0  # at the start of a training, in which a step's time is measured
KEPT = 2000  # of what ranks have said, at each kill


@dataclass(frozen=True)
class RecoveryPlan:
    """The settings of the `recovery` benchmark.

    Attributes:
        variants: Names of VARIANTS.
        ranks: Number of processes.
        rounds: Trainings of every variant.
        kills: How many ranks are killed in each.
        checkpoint_steps: torchelastic saves a checkpoint after so many steps.
        seed: Of the moments and the victims.
    """

    variants: tuple[str, ...] = VARIANTS
    ranks: int = 4
    rounds: int = 4
    kills: int = 5
    checkpoint_steps: int = 1
    seed: int = 1


def run(
    plan: RecoveryPlan, torchft: Path | None = None, progress: Progress = lambda text: None
) -> Report:
    """Kill ranks of all variants.

    Args:
        plan: The settings.
        torchft: The virtual environment in which torchft is installed.
        progress: Shows what is being done.

    Raises:
        JobError: A training did not go on.
    """
    report = Report("recovery", asdict(plan), machine.describe())
    report.skipped = {name: why for name in plan.variants if (why := missing(name, torchft))}
    names = [name for name in plan.variants if name not in report.skipped]
    choice = random.Random(plan.seed)
    found: dict[str, list[Recovery]] = {name: [] for name in names}
    steps: dict[str, list[float]] = {name: [] for name in names}
    for number in range(plan.rounds):
        for name in names:
            launch = Launch(name, plan.ranks, plan.kills, plan.checkpoint_steps, torchft)
            with Training(launch) as training:
                progress(f"round {number + 1} of {plan.rounds}: {name} starts")
                steps[name].append(_calm(training))
                for kill in range(plan.kills):
                    progress(f"round {number + 1} of {plan.rounds}: {name}, kill {kill + 1}")
                    found[name].append(_kill(training, choice))
    report.measurements = [_measurement(name, found[name], steps[name]) for name in names]
    report.versions["torch"] = metadata.version("torch")
    return report


def _calm(training: Training) -> float:
    """Wait until all ranks train; return the microseconds of a step."""
    training.until(_step_of_all(training))
    del training.said[:]
    training.listen_for(CALM_S)
    return step_us(training.said)


def _step_of_all(training: Training) -> Callable[[], frozenset[int] | None]:
    def pids() -> frozenset[int] | None:
        steps = [s for s in steps_together(training.said) if len(s.pids) == training.launch.ranks]
        return steps[-1].pids if steps else None

    return pids


def _kill(training: Training, choice: random.Random) -> Recovery:
    """Kill a rank at a random moment, and wait until as many ranks as before train."""
    training.listen_for(0.5 + choice.random())
    victim = choice.choice(sorted(training.until(_step_of_all(training))))
    del training.said[:-KEPT]
    since = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    return training.until(lambda: recovery(training.said, training.launch.ranks, victim, since))


def _measurement(name: str, found: list[Recovery], steps: list[float]) -> Measurement:
    facts = {
        "step_us": round(median(steps), 1),
        "lost_steps": [one.lost_steps for one in found],
        "whole_s": [round(one.whole_s, 4) for one in found],
    }
    return Measurement(name, tuple(1e6 * one.seconds for one in found), facts=facts)


def recovery_table(report: Report) -> Table:
    """Return a table with one row per variant."""
    s = report.settings
    return render(
        report,
        f"one of {s['ranks']} ranks is killed, {s['rounds'] * s['kills']} times for each way, "
        f"{report.machine['cores']} cores",
        f"{s['rounds']} alternating trainings with {s['kills']} kills each; goes on: from SIGKILL "
        f"until the next step of all who are left ({TORCHELASTIC}: of all ranks, which start "
        f"again); whole: until as many ranks as before have taken a step; {TORCHELASTIC} saves a "
        f"checkpoint every {s['checkpoint_steps']} steps; {TORCHFT}: one replica group for each "
        "rank, settings of its README and train_ddp.py",
        [
            variant("way"),
            Column("goes on, median", lambda m: f"{m.us / 1e6:.2f} s"),
            Column("worst", lambda m: f"{max(m.rounds_us) / 1e6:.2f} s"),
            Column("steps lost", lambda m: f"{median(m.facts['lost_steps']):g}"),
            Column("worst", lambda m: str(max(m.facts["lost_steps"]))),
            Column("whole, median", lambda m: f"{median(m.facts['whole_s']):.1f} s"),
            Column("worst", lambda m: f"{max(m.facts['whole_s']):.1f} s"),
            Column("a step, without kills", lambda m: f"{m.facts['step_us'] / 1e3:.1f} ms"),
        ],
    )
