"""The results of a benchmark, in one format for all benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

SCHEMA = 2
Progress = Callable[[str], None]
GLOO = "gloo"


@dataclass(frozen=True)
class Measurement:
    """One variant in one case.

    Attributes:
        variant: One of the alternating candidates: a library, a backend, a way to train.
        rounds_us: Microseconds of a call or step, one value per round.
        case: The measured case, such as an operation and a size.
        facts: Further facts about the measurement.
    """

    variant: str
    rounds_us: tuple[float, ...]
    case: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def us(self) -> float:
        """The median over the rounds."""
        return median(self.rounds_us)


@dataclass
class Report:
    """All measurements of a run, with the conditions of the run.

    Attributes:
        operation: The command.
        settings: The command's options.
        machine: The result of `machine.describe`.
        measurements: The measurements, in the order of the table's rows.
        facts: Facts beside the measurements, such as the size of a model.
        versions: Versions of libraries, by variant.
        skipped: Why variants are missing.
    """

    operation: str
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def variants(self) -> list[str]:
        """All measured variants, each once."""
        return list(dict.fromkeys(m.variant for m in self.measurements))

    def find(self, variant: str, **case: Any) -> Measurement | None:
        """Return the first measurement of a variant in a case, or None."""
        for m in self.measurements:
            if m.variant == variant and all(m.case[key] == value for key, value in case.items()):
                return m
        return None

    def us(self, variant: str, **case: Any) -> float:
        """Return the microseconds of a variant.

        Raises:
            KeyError: The variant was not measured.
        """
        if found := self.find(variant, **case):
            return found.us
        raise KeyError(variant)

    def speedup(self, m: Measurement, over: str = GLOO) -> float | None:
        """Return the speedup over another variant in the same case; None if that is missing."""
        other = self.find(over, **m.case)
        return other.us / m.us if other else None

    def to_json(self) -> dict[str, Any]:
        """Return plain data; `docs/benchmarks.md` describes the fields."""
        entries = [
            {
                "variant": m.variant,
                **m.case,
                "rounds_us": [round(us, 3) for us in m.rounds_us],
                "us": round(m.us, 3),
                "times_gloo": round(faster, 4) if (faster := self.speedup(m)) else None,
                **m.facts,
            }
            for m in self.measurements
        ]
        return {"schema": SCHEMA, **asdict(self), "measurements": entries}


def alternate(
    variants: Iterable[str], rounds: int, turn: Callable[[str], float], progress: Progress
) -> dict[str, tuple[float, ...]]:
    """Return the microseconds of every round of every variant: A B C, A B C, ...

    Args:
        variants: The variants, in the order of their turns.
        rounds: Number of turns of each variant.
        turn: Runs one turn of a variant and returns its microseconds.
        progress: Called with the current variant.
    """
    names = list(variants)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            progress(f"round {number + 1} of {rounds}: {name}")
            found[name].append(turn(name))
    return {name: tuple(values) for name, values in found.items()}


def step_us(ranks: Sequence[Sequence[float]], warm_up: int = 0) -> float:
    """Return the microseconds of a step: median over the steps of the mean over the ranks.

    Args:
        ranks: Seconds of each step, by rank.
        warm_up: Number of first steps to ignore.
    """
    return 1e6 * median([fmean(step) for step in zip(*ranks, strict=True)][warm_up:])
