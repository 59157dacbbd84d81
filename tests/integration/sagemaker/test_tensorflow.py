"""SageMaker's toolkit for TensorFlow runs jobs over this package, on one host and on two."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.sagemaker.job import Job, parameters
from tests.integration.sagemaker.requirements import reason_against
from tests.integration.sagemaker.side_jobs import End, started

TOOLKIT = Path(os.environ.get("SDP_TEST_SAGEMAKER", "")) / "tensorflow"
MODEL_DIR = "/opt/ml/model"  # in S3 the toolkit would ask AWS for the region

pytestmark = [
    pytest.mark.skipif(bool(reason := reason_against(TOOLKIT)), reason=reason),
    pytest.mark.timeout(600),
]

LOOP = parameters("tensorflow_loop.py", model_dir=MODEL_DIR)
JOBS = {
    "two hosts": Job(LOOP, hosts=2, framework="tensorflow"),
    "one host": Job(LOOP, framework="tensorflow"),
    "Keras": Job(parameters("keras_fit.py"), hosts=2, framework="tensorflow"),
}


@pytest.fixture(scope="module")
def end(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[End]:
    """`end("two hosts")`: that job."""
    yield from started(JOBS, TOOLKIT, tmp_path_factory, request)


@pytest.mark.parametrize("name", ["two hosts", "one host"])
def test_a_loop_over_smddps_api(end: End, name: str) -> None:
    ended, hosts = end(name), JOBS[name].hosts
    assert ended.codes == [0] * hosts, "\n".join(ended.logs)
    said = re.search(r"ranks=(\d+); loss=(\S+); model_dir=(\S+)", ended.logs[0])
    assert said
    assert (said[1], said[3]) == (str(2 * hosts), MODEL_DIR)
    assert float(said[2]) < 1.0
    assert (ended.ml[0] / "model" / "model.keras").exists()


@pytest.mark.parametrize("name", ["Keras"])
def test_keras_fit(end: End, name: str) -> None:
    ended = end(name)
    assert ended.codes == [0, 0], "\n".join(ended.logs)
    said = re.search(r"ranks=(\d+); accuracy=(\S+);", ended.logs[0])
    assert said
    assert said[1] == "4"
    assert float(said[2]) > 0.9
