"""What a run found, and the arithmetic on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

SCHEMA = 1


def busbw_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth / algorithm bandwidth, as nccl-tests' PERFORMANCE.md defines it.

    An all_reduce moves at least 2 (n - 1) / n of the data over every rank's link.
    """
    if operation != "all_reduce":
        raise ValueError(f"no bus bandwidth is defined for {operation}")
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True)
class Measurement:
    """One peer, one dtype, one size.

    Attributes:
        rounds_us: Microseconds of a call, one value per round: the median over the round's calls
            of the mean over the ranks.
        path: How the operation travelled, if the peer says so.
    """

    peer: str
    operation: str
    dtype: str
    nbytes: int
    ranks: int
    rounds_us: tuple[float, ...]
    path: str = ""

    @property
    def latency_us(self) -> float:
        """The median over the rounds."""
        return median(self.rounds_us)

    @property
    def algbw_gbps(self) -> float:
        """Bytes of one rank's buffer per second, in 1e9 bytes/s."""
        return self.nbytes / self.latency_us / 1e3

    @property
    def busbw_gbps(self) -> float:
        """Algorithm bandwidth times `busbw_factor`."""
        return self.algbw_gbps * busbw_factor(self.operation, self.ranks)


@dataclass
class Report:
    """All measurements of a run, and on what they were taken."""

    operation: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def find(self, peer: str, dtype: str, nbytes: int) -> Measurement | None:
        """The measurement of a peer, None if it was not made."""
        for m in self.measurements:
            if (m.peer, m.dtype, m.nbytes) == (peer, dtype, nbytes):
                return m
        return None

    def speedup(self, m: Measurement, reference: str = "gloo") -> float | None:
        """How many times faster than the reference; None without one."""
        other = self.find(reference, m.dtype, m.nbytes)
        return other.latency_us / m.latency_us if other else None

    def to_json(self) -> dict[str, Any]:
        """Plain data; `docs/benchmarks.md` describes the fields."""
        return {
            "schema": SCHEMA,
            "operation": self.operation,
            "settings": self.settings,
            "machine": self.machine,
            "versions": self.versions,
            "skipped": self.skipped,
            "measurements": [self._entry(m) for m in self.measurements],
        }

    def _entry(self, m: Measurement) -> dict[str, Any]:
        moves_data = m.operation == "all_reduce"
        return {
            **asdict(m),
            "rounds_us": [round(us, 3) for us in m.rounds_us],
            "latency_us": round(m.latency_us, 3),
            "algbw_gbps": round(m.algbw_gbps, 4) if moves_data else None,
            "busbw_gbps": round(m.busbw_gbps, 4) if moves_data else None,
            "times_gloo": round(s, 3) if (s := self.speedup(m)) else None,
        }
