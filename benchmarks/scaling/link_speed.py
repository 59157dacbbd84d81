"""Finds the link speed at which communication is a given share of a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LOW, AIM, HIGH = 0.30, 0.45, 0.60
"""The wanted share: AIM is the target; a result is valid from LOW to HIGH."""
CLOSE_ENOUGH = 0.08
"""Distance from AIM at which the search ends; times vary, so it stays away from LOW and HIGH."""
MOST_TRIES = 4
MOST_CHANGE = 4.0
"""Factor by which one trial may change the speed, so that a disturbed step cannot mislead it."""
GBIT = (0.02, 40.0)


@dataclass(frozen=True)
class Trial:
    """The time of a step at some speed, without communication and over the reference backend."""

    gbit: float
    no_comm_s: float
    step_s: float

    @property
    def exposed_s(self) -> float:
        """The time that communication adds to the step."""
        return self.step_s - self.no_comm_s

    @property
    def share(self) -> float:
        """The share of communication in the step."""
        return self.exposed_s / self.step_s

    @property
    def wanted_s(self) -> float:
        """The time that communication should add."""
        return wanted_s(self.no_comm_s)


def wanted_s(no_comm_s: float) -> float:
    """Return the time that communication adds to a step if its share is the target."""
    return no_comm_s * AIM / (1 - AIM)


def estimate(payload: float, no_comm_s: float) -> float:
    """Return Gbit/s for communication that does not overlap computation."""
    return within_bounds(payload * 8e-9 / wanted_s(no_comm_s))


def corrected(trial: Trial, payload: float) -> float:
    """Return the next speed to try.

    Whatever the overlap with computation, one more second on the link adds about one second to the
    step.
    """
    wire_s = payload * 8e-9 / trial.gbit
    wanted = wire_s + trial.wanted_s - trial.exposed_s
    wanted = min(max(wanted, wire_s / MOST_CHANGE), wire_s * MOST_CHANGE)
    return within_bounds(payload * 8e-9 / wanted)


def within_bounds(gbit: float) -> float:
    """Return the nearest speed that links support and that fits in a table."""
    return float(f"{min(max(gbit, GBIT[0]), GBIT[1]):.2g}")


def search(measure: Callable[[float], Trial], payload: float, no_comm_s: float) -> Trial:
    """Return the trial whose share is closest to the target.

    Args:
        measure: Trains a few steps at a speed.
        payload: Bytes that leave every node in a step.
        no_comm_s: Seconds of a step without communication.
    """
    trials = [measure(estimate(payload, no_comm_s))]
    while len(trials) < MOST_TRIES and abs(trials[-1].share - AIM) > CLOSE_ENOUGH:
        gbit = corrected(trials[-1], payload)
        if gbit == trials[-1].gbit:
            break
        trials.append(measure(gbit))
    return min(trials, key=lambda trial: abs(trial.share - AIM))
