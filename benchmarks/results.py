"""What a benchmark has found, in one form for all of them."""

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
        variant: What took turns with others: a library, a backend, a way to train.
        rounds_us: Microseconds of a call or step, one value per round.
        case: What was measured, such as an operation and a size.
        facts: What else is known about it.
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
    """All measurements of a run, and on what they were taken.

    Attributes:
        operation: The command.
        settings: Its options.
        machine: See `machine.describe`.
        measurements: In the order of the table's rows.
        facts: What is known beside the measurements, such as the size of a model.
        versions: Of libraries, by variant.
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
        """All that were measured, each once."""
        return list(dict.fromkeys(m.variant for m in self.measurements))

    def find(self, variant: str, **case: Any) -> Measurement | None:
        """The first measurement of a variant in a case, None if it was not made."""
        for m in self.measurements:
            if m.variant == variant and all(m.case[key] == value for key, value in case.items()):
                return m
        return None

    def us(self, variant: str, **case: Any) -> float:
        """What a variant took.

        Raises:
            KeyError: It was not measured.
        """
        if found := self.find(variant, **case):
            return found.us
        raise KeyError(variant)

    def speedup(self, m: Measurement, over: str = GLOO) -> float | None:
        """How many times faster than another variant in the same case; None without that."""
        other = self.find(over, **m.case)
        return other.us / m.us if other else None

    def to_json(self) -> dict[str, Any]:
        """Plain data; `docs/benchmarks.md` describes the fields."""
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
    """Microseconds of every round of every variant: A B C, A B C, ...

    Args:
        variants: In the order of their turns.
        rounds: How many turns each has.
        turn: One turn of a variant; its microseconds.
        progress: Told whose turn it is.
    """
    names = list(variants)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            progress(f"round {number + 1} of {rounds}: {name}")
            found[name].append(turn(name))
    return {name: tuple(values) for name, values in found.items()}


def step_us(ranks: Sequence[Sequence[float]], warm_up: int = 0) -> float:
    """Microseconds of a step: median over the steps, after some, of the mean over the ranks.

    Args:
        ranks: Seconds of each step, by rank.
        warm_up: Steps that do not count.
    """
    return 1e6 * median([fmean(step) for step in zip(*ranks, strict=True)][warm_up:])
