"""What the benchmark of Keras makes of its times."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from rich.console import Console

from benchmarks.keras import KerasPlan, keras_table, overlapped
from benchmarks.results import Measurement, Report


def report(gbit: float | None = None, **rounds_ms: list[float]) -> Report:
    found = Report("keras", asdict(KerasPlan(gbit=gbit)), {}, facts={"parameters": 38_600_000})
    for way, rounds in rounds_ms.items():
        found.measurements.append(Measurement(way, tuple(1e3 * ms for ms in rounds)))
    return found


def shown(found: Report) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(keras_table(found))
    return " ".join(capture.get().split())


def test_ratios_of_medians() -> None:
    rounds: dict[str, list[float]] = {"no_comm": [100, 90, 110], "smddp": [150, 140, 400]}
    text = shown(report(**rounds, mwms=[600, 600, 600], **{"mwms, huge pages": [500, 510, 490]}))
    row = text[text.index("smddp") : text.index(" mwms 600")]
    assert row.split()[:2] == ["smddp", "150"]
    assert row.split()[-2:] == ["1.50", "0.25"]
    assert "490 ms - 510 ms 5.00 0.83" in text
    assert "one machine" in text


@pytest.mark.parametrize(
    ("step", "expected"),
    [(300.0, 0.0), (200.0, 1.0), (250.0, 0.5), (320.0, 0.0)],
)
def test_overlapped_part_of_the_shorter(step: float, expected: float) -> None:
    found = report(2.0, no_comm=[100.0], smddp=[step], alone=[200.0])
    assert overlapped(found) == pytest.approx(expected)
    assert f"{100 * expected:.0f} % of the shorter" in shown(found)
    assert overlapped(report(no_comm=[100.0], smddp=[step])) is None
