"""Finds the speed of the links at which communication is a given share of a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LOW, AIM, HIGH = 0.30, 0.45, 0.60
"""The share that is wanted: where a result counts, and what is aimed at."""
CLOSE_ENOUGH = 0.08
"""Distance from AIM with which the search is content; times swing, so it keeps off LOW and HIGH."""
MOST_TRIES = 4
MOST_CHANGE = 4.0
"""Factor by which one try may change the speed: a step that was disturbed must not mislead it."""
GBIT = (0.02, 40.0)


@dataclass(frozen=True)
class Trial:
    """A step at some speed, without communication and over the backend that is the measure."""

    gbit: float
    no_comm_s: float
    step_s: float

    @property
    def exposed_s(self) -> float:
        """What communication adds to the step."""
        return self.step_s - self.no_comm_s

    @property
    def share(self) -> float:
        """Of communication in the step."""
        return self.exposed_s / self.step_s

    @property
    def wanted_s(self) -> float:
        """What communication should add."""
        return wanted_s(self.no_comm_s)


def wanted_s(no_comm_s: float) -> float:
    """What communication adds to a step of which it is the share aimed at."""
    return no_comm_s * AIM / (1 - AIM)


def estimate(payload: float, no_comm_s: float) -> float:
    """Gbit/s, were nothing of the payload's bytes sent while the step computes."""
    return within_bounds(payload * 8e-9 / wanted_s(no_comm_s))


def corrected(trial: Trial, payload: float) -> float:
    """The next speed to try.

    However much of it is hidden behind computing, a second more on the wire is about a second more
    in the step.
    """
    wire_s = payload * 8e-9 / trial.gbit
    wanted = wire_s + trial.wanted_s - trial.exposed_s
    wanted = min(max(wanted, wire_s / MOST_CHANGE), wire_s * MOST_CHANGE)
    return within_bounds(payload * 8e-9 / wanted)


def within_bounds(gbit: float) -> float:
    """A speed that links can have, and that can be written in a table."""
    return float(f"{min(max(gbit, GBIT[0]), GBIT[1]):.2g}")


def search(measure: Callable[[float], Trial], payload: float, no_comm_s: float) -> Trial:
    """The trial whose share came closest to what is aimed at.

    Args:
        measure: Trains a few steps at a speed.
        payload: Bytes that leave every node in a step.
        no_comm_s: Of a step without communication.
    """
    trials = [measure(estimate(payload, no_comm_s))]
    while len(trials) < MOST_TRIES and abs(trials[-1].share - AIM) > CLOSE_ENOUGH:
        gbit = corrected(trials[-1], payload)
        if gbit == trials[-1].gbit:
            break
        trials.append(measure(gbit))
    return min(trials, key=lambda trial: abs(trial.share - AIM))
