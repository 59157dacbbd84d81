"""Estimators as in SDK 1, where a hyperparameter stands for `distribution`."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdp_plugins.sagemaker import PyTorch
from tests.sagemaker.jobs import PROCESSES, fitted

ENABLED = "sagemaker_distributed_dataparallel_enabled"


def test_a_hyperparameter_in_place_of_the_distribution(tmp_path: Path, source: Path) -> None:
    given = {
        ENABLED: True,
        "sagemaker_distributed_dataparallel_custom_mpi_options": "-x GIVEN=1",
        PROCESSES: 2,
        "epochs": 3,
    }
    ranks = fitted(tmp_path, source, instance_count=2, hyperparameters=given)
    assert sorted(ranks) == ["0", "1", "2", "3"]
    assert {rank["environment"]["GIVEN"] for rank in ranks.values()} == {"1"}
    assert ranks["0"]["arguments"] == ["--epochs", "3"]


def test_one_that_is_set_later() -> None:
    estimator = PyTorch(entry_point="show.py", hyperparameters={"n": 1})
    estimator.set_hyperparameters(epochs=2, **{ENABLED: True})
    found = estimator.hyperparameters()
    assert {"n": 1, "epochs": 2, ENABLED: True}.items() <= found.items()
    assert found["sagemaker_instance_type"] == "local"


def test_one_that_is_false() -> None:
    with pytest.raises(ValueError, match="2 hosts would each run the whole job"):
        PyTorch(entry_point="show.py", instance_count=2, hyperparameters={ENABLED: False})
