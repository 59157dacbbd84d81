"""Slow links: the tables; a real run as root."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.slow import names, table
from benchmarks.slow.measure import SlowPlan, SlowReport
from tests.nodes import needs_nodes

torch = pytest.importorskip("torch")
from benchmarks.slow import language, variants  # noqa: E402  these import torch

LIMIT_S = 600
MEASURED = ("none", "gloo", "float32", "int8")


def test_every_variant_has_a_name() -> None:
    assert set(variants.VARIANTS) == set(names.NAMES)
    assert set(names.IN_EACH_STEP) | set(names.NOW_AND_THEN) == set(names.NAMES)


def test_the_text_is_divided() -> None:
    training, held_out, letters = language.text()
    assert len(training) > 400_000 and len(held_out) > 20_000 and 90 < letters < 200
    inputs, targets = language.LanguageWorkload(0).batch(3, 1)
    assert inputs.shape == targets.shape == (language.ROWS, language.CONTEXT)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not torch.equal(inputs, language.LanguageWorkload(0).batch(3, 2)[0])


def report() -> SlowReport:
    plan = SlowPlan(4, (100.0,), ("language",), MEASURED, rounds=3, loss_steps=20, seeds=2)
    found = SlowReport(plan, parameters={"language": 400_000})
    seconds = {  # the machine is slower from the second round on, but for one turn
        "none": [0.1, 0.2, 0.2],
        "gloo": [1.0, 2.0, 2.0],
        "float32": [0.8, 1.6, 1.6],
        "int8": [0.25, 0.5, 0.25],
    }
    found.step_s["language"] = {100.0: seconds}
    found.rounding_s = {"memcpy": 1e-3, "int8": 9e-4}
    sent = {"none": 0.0, "gloo": 2e6, "float32": 2e6, "int8": 0.5e6}
    found.sent["language"] = {100.0: sent}
    for variant, last in (("float32", 2.0), ("int8", 2.01)):
        found.losses[variant] = [[4.0] * 10 + [last], [4.0] * 10 + [last + 0.2]]
    return found


def test_the_tables() -> None:
    page = io.StringIO()
    for shown, _ in table.tables(report()):
        Console(file=page, width=200).print(shown)
    lines = [line.split() for line in page.getvalue().splitlines()]
    assert ["int8", "0.90", "0.90"] in lines
    assert ["int8", "250", "4.00", "40.0%", "0.50", "0.2500"] in lines
    assert ["100", "none", "200", "10.00", "100.0%", "0.00", "0.0000"] in lines
    assert ["int8", "4.0000", "4.0000", "4.0000", "2.1100", "+0.48%", "0.1"] in lines


def test_unknown_variants_are_refused() -> None:
    done = CliRunner().invoke(app, ["slow", "--variants", "int8,int7"])
    assert done.exit_code == 2 and "unknown 'int7'" in done.output


@needs_nodes
@pytest.mark.timeout(LIMIT_S + 20)
def test_a_run(tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    line = ["slow", "--mbit", "1000", "--nodes", "2", "--repeats", "1", "--steps", "1"]
    line += [
        "--models",
        "language",
        "--variants",
        "gloo-powersgd,gloo-local-sgd,float32,int8,local-sgd",
    ]
    line += ["--loss-steps", "20", "--seeds", "1", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *line],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "int8, round 1 of" in done.stderr  # a line for each turn, as there is no terminal
    found = json.loads(path.read_text())
    sent = found["sent"]["language"]["1000.0"]
    assert 0.25 < sent["int8"] / sent["float32"] < 0.3
    assert 0 < sent["local-sgd"] / sent["float32"] < 0.03
    assert 0 < sent["gloo-powersgd"] < 0.3 * sent["float32"]
    assert set(found["rounding_s"]) == {"memcpy", "int8", "fp8", "int4"}
    losses = {variant: seeds[0] for variant, seeds in found["losses"].items()}
    for variant, values in losses.items():
        assert 4.3 < values[0] < 5 and values[-1] < 4, variant
    assert abs(losses["int8"][-1] / losses["float32"][-1] - 1) < 0.02
