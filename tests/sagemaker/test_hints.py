"""What a user hears who has misspelt something, or asked for what this machine has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdp_plugins.sagemaker import HuggingFace, PyTorch, TensorFlow
from tests.sagemaker.distributions import DATA_PARALLEL

LEFT = "is unknown and ignored"
HINT = f"{LEFT}. Hint: did you mean"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (PyTorch, {"instance_cout": 2}, [f"instance_cout {HINT} instance_count?"]),
        (PyTorch, {"metric_definition": []}, [f"metric_definition {HINT} metric_definitions?"]),
        (TensorFlow, {"modeldir": "x"}, [f"modeldir {HINT} model_dir?"]),
        (
            HuggingFace,
            {"transformer_version": "4"},
            [f"transformer_version {HINT} transformers_version?"],
        ),
        (
            PyTorch,
            {"misspelt": 1, "volum_size": 2},
            [f"misspelt {LEFT}", f"volum_size {HINT} volume_size?"],
        ),
        (PyTorch, {"role": "x", "framework_version": "2.2.0", "training_plan": "y"}, []),
    ],
)
def test_arguments(
    caplog: pytest.LogCaptureFixture, kind: Any, options: dict[str, Any], expected: list[str]
) -> None:
    kind(entry_point="train.py", **options)
    assert said(caplog) == expected


def test_arguments_of_fit(caplog: pytest.LogCaptureFixture, source: Path) -> None:
    estimator = PyTorch(
        entry_point="show.py", source_dir=str(source), output_path=str(source.parent)
    )
    estimator.fit(job_nam="x", experiment_config={})
    assert said(caplog) == [f"fit: job_nam {HINT} job_name?"]


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [
        (
            {"smdistributed": {"dataparallel": {"enabled": True, "custom_mpi_option": "-x A=1"}}},
            f"dataparallel: custom_mpi_option {HINT} custom_mpi_options?",
        ),
        (
            {"smdistributed": {"dataparallel": {"enable": True}}},
            f"dataparallel: enable {HINT} enabled?",
        ),
        (
            {"mpi": {"enabled": True, "process_per_host": 2}},
            f"mpi: process_per_host {HINT} processes_per_host?",
        ),
        (
            {"pytorchddp": {"enabled": "False"}},
            "pytorchddp: enabled='False' is a string, which counts as True, as in the SDK",
        ),
    ],
)
def test_options_of_distributions(
    caplog: pytest.LogCaptureFixture, distribution: dict[str, Any], expected: str
) -> None:
    PyTorch(entry_point="train.py", distribution=distribution)
    assert said(caplog) == [expected]


def test_distributions_that_are_right(caplog: pytest.LogCaptureFixture) -> None:
    for distribution in (DATA_PARALLEL, {"mpi": {"enabled": "True", "processes_per_host": 2}}):
        PyTorch(entry_point="train.py", distribution=distribution)
    PyTorch(entry_point="train.py", distribution={"torch_distributed": {"enabled": False}})
    assert not said(caplog)


@pytest.mark.parametrize(("gpus", "warned"), [(0, True), (1, False)])
def test_local_gpu(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, gpus: int, warned: bool
) -> None:
    monkeypatch.setattr("sdp_plugins.sagemaker.estimator.count_gpus", lambda: gpus)
    PyTorch(entry_point="train.py", instance_type="local_gpu")
    assert bool(said(caplog)) == warned
