"""`metric_definitions`, tried on this machine before CloudWatch has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdp_plugins.sagemaker import PyTorch, TrainingJobError
from tests.sagemaker.distributions import DATA_PARALLEL

SAY = """
import os, sys
if os.environ["RANK"] == "0":
    for epoch in range(3):
        print(f"epoch={epoch}; loss={1 / 2 ** epoch}; accuracy=high;", flush=True)
    print("valid=nan; valid=0.5;", file=sys.stderr, flush=True)
    if "--fail" in sys.argv:
        raise SystemExit(3)
"""
DEFINITIONS = [
    {"Name": "loss", "Regex": r"loss=(\S+);"},
    {"Name": "valid", "Regex": r"valid=(0\.\d+);"},
    {"Name": "accuracy", "Regex": r"accuracy=(\S+);"},
    {"Name": "other", "Regex": r"other: (.*)"},
]


def job(tmp_path: Path, **hyperparameters: Any) -> PyTorch:
    (tmp_path / "say.py").write_text(SAY)
    return PyTorch(
        entry_point=str(tmp_path / "say.py"),
        instance_count=2,
        hyperparameters=hyperparameters,
        distribution=DATA_PARALLEL,
        output_path=str(tmp_path / "out"),
        metric_definitions=DEFINITIONS,
    )


def test_the_values_of_a_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    estimator = job(tmp_path)
    estimator.fit()
    values = {"loss": [1.0, 0.5, 0.25], "valid": [0.5], "accuracy": [], "other": []}
    assert estimator.metrics == values
    assert capfd.readouterr().out.splitlines()[-4:] == [
        "metric 'loss': last value 0.25, 3 in all",
        "metric 'valid': last value 0.5, 1 in all",
        "metric 'accuracy': no value; 3 matches are not numbers, such as 'high'",
        "metric 'other': no line of the output matched",
    ]
    estimator.fit(logs=False)
    assert estimator.metrics == values  # of the last job alone
    assert capfd.readouterr().out == ""


def test_a_job_that_fails_has_values_too(tmp_path: Path) -> None:
    estimator = job(tmp_path, fail=True)
    with pytest.raises(TrainingJobError):
        estimator.fit()
    assert estimator.metrics["loss"] == [1.0, 0.5, 0.25]
    assert estimator.metrics["valid"] == [0.5]  # though the report on the rank repeats its line


@pytest.mark.parametrize(
    ("definitions", "text"),
    [
        ([{"Name": "loss", "Regex": "loss=("}], r"metric 'loss': Regex 'loss=\(' cannot be used: "),
        ([{"Name": "loss", "Regex": "loss"}], "has no group for the value. Hint: "),
        ([{"Name": "loss"}], "must have Name and Regex"),
        ([{"Name": "", "Regex": "(x)"}], "1 to 255"),
        ([{"Name": "loss", "Regex": "(" + "x" * 500 + ")"}], "1 to 500"),
        ({"loss": "(x)"}, "must be a list"),
        ("loss", "must be a list"),
        ([{"Name": "loss", "Regex": "(x)"}] * 41, "40 at most"),
    ],
)
def test_wrong_ones_are_refused_before_a_job_begins(definitions: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PyTorch(entry_point="train.py", metric_definitions=definitions)
