"""The estimator of SageMaker's SDK for scripts that use HuggingFace's libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdp_plugins.sagemaker import HuggingFace
from tests.sagemaker.distributions import DATA_PARALLEL
from tests.sagemaker.jobs import fitted

VERSIONS = {"transformers_version": "4.49.0", "py_version": "py311"}


@pytest.mark.parametrize(
    ("version", "framework"), [("pytorch_version", "pytorch"), ("tensorflow_version", "tensorflow")]
)
def test_a_job_for_either_framework(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture, version: str, framework: str
) -> None:
    ranks = fitted(
        tmp_path,
        source,
        framework=HuggingFace,
        instance_count=2,
        hyperparameters={"epochs": 1, "model_name_or_path": "t5"},
        distribution=DATA_PARALLEL,
        **VERSIONS,
        **{version: "2.5.1"},
    )
    assert sorted(ranks) == ["0", "1"]
    assert ranks["1"]["arguments"] == ["--epochs", "1", "--model_name_or_path", "t5"]
    found = ranks["0"]["environment"]["SM_FRAMEWORK_MODULE"]
    assert found == f"sagemaker_{framework}_container.training:main"
    assert not caplog.records


def test_both_frameworks_are_refused_as_by_the_sdk() -> None:
    versions = {"pytorch_version": "2.5.1", "tensorflow_version": "2.18"}
    with pytest.raises(ValueError, match="Specify only tensorflow_version or pytorch_version"):
        HuggingFace(entry_point="train.py", **VERSIONS, **versions)
