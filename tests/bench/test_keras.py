"""What the benchmark of Keras makes of its times."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from rich.console import Console

from sdp_plugins.bench.keras import KerasPlan, KerasReport, keras_table


def report(gbit: float | None = None, **rounds_ms: list[float]) -> KerasReport:
    return KerasReport(asdict(KerasPlan(gbit=gbit)), {}, 38_600_000, rounds_ms)


def shown(found: KerasReport) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(keras_table(found))
    return " ".join(capture.get().split())


def test_ratios_of_medians() -> None:
    rounds: dict[str, list[float]] = {"none": [100, 90, 110], "smddp": [150, 140, 400]}
    text = shown(report(**rounds, mwms=[600, 600, 600], **{"mwms, huge pages": [500, 510, 490]}))
    row = text[text.index("smddp") : text.index(" mwms 600")]
    assert row.split()[:2] == ["smddp", "150"]
    assert row.split()[-2:] == ["1.50", "0.25"]
    assert "490 ms - 510 ms 5.00 0.83" in text
    assert "one machine" in text


@pytest.mark.parametrize(
    ("step", "overlapped"),
    [(300.0, 0.0), (200.0, 1.0), (250.0, 0.5), (320.0, 0.0)],
)
def test_overlapped_part_of_the_shorter(step: float, overlapped: float) -> None:
    found = report(2.0, none=[100.0], smddp=[step], alone=[200.0])
    assert found.overlapped == overlapped
    assert f"{100 * overlapped:.0f} % of the shorter" in shown(found)
    assert report(none=[100.0], smddp=[step]).overlapped is None
