"""What SageMaker's SDKs send for the documented calls, and that the containers get on with it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sdp_plugins.sagemaker import HuggingFace, PyTorch, TensorFlow
from tests.integration.sagemaker.job import SCRIPTS, Job, parameters, run_job
from tests.integration.sagemaker.requirements import reason_against
from tests.sagemaker.distributions import BAD, DATA_PARALLEL

ENVIRONMENTS = Path(os.environ.get("SDP_TEST_SAGEMAKER", ""))
TOOLKIT = ENVIRONMENTS / "pytorch"
HERE = Path(__file__).parent
PYTORCH = {
    "entry_point": "train.py",
    "instance_count": 2,
    "instance_type": "ml.p4d.24xlarge",
    "framework_version": "2.2.0",
    "py_version": "py310",
}
TENSORFLOW = PYTORCH | {"framework_version": "2.11.0", "py_version": "py39"}
HUGGING_FACE = {
    "entry_point": "train.py",
    "instance_count": 2,
    "instance_type": "ml.p4d.24xlarge",
    "transformers_version": "4.26.0",
    "pytorch_version": "1.13.1",
    "py_version": "py39",
}
BOTH_FRAMEWORKS = HUGGING_FACE | {"tensorflow_version": "2.11.0"}
OWN_IMAGE = {
    "entry_point": "train.py",
    "instance_count": 1,
    "instance_type": "ml.c5.xlarge",
    "image_uri": "me/mine:1",
}
OPTIONS = "-verbose -x NCCL_DEBUG=VERSION"
WITH_OPTIONS = {"smdistributed": {"dataparallel": {"enabled": True, "custom_mpi_options": OPTIONS}}}

pytestmark = [
    pytest.mark.skipif(
        not (ENVIRONMENTS / "sdk2").exists(), reason="no SDK is named: make test-sagemaker"
    ),
    pytest.mark.timeout(300),
]


def python(sdk: str, *line: str, text: str = "") -> Any:
    """What a program prints last, as JSON, in the environment of an SDK."""
    program = [str(ENVIRONMENTS / sdk / "bin" / "python"), *line]
    env = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(
        program, input=text, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("source")
    (folder / "train.py").touch()
    return str(folder)


@pytest.fixture(scope="module")
def sdk_2(source: str) -> dict[str, Any]:
    """What SDK 2 makes of each of these calls."""
    calls = {
        "PyTorch": ["PyTorch", {**PYTORCH, "distribution": WITH_OPTIONS}],
        "TensorFlow": ["TensorFlow", {**TENSORFLOW, "distribution": DATA_PARALLEL}],
        "HuggingFace": ["HuggingFace", {**HUGGING_FACE, "distribution": DATA_PARALLEL}],
        "both frameworks": ["HuggingFace", {**BOTH_FRAMEWORKS, "distribution": DATA_PARALLEL}],
        "own image": ["PyTorch", {**OWN_IMAGE, "distribution": DATA_PARALLEL}],
        "as SDK 1": [
            "PyTorch",
            {**OWN_IMAGE, "hyperparameters": {"sagemaker_distributed_dataparallel_enabled": True}},
        ],
        **{name: ["PyTorch", {**PYTORCH, "distribution": bad}] for name, bad in BAD.items()},
    }
    asked = [[name, {"source_dir": source, **options}] for name, options in calls.values()]
    answers = python("sdk2", str(HERE / "sdk2.py"), text=json.dumps(asked))
    return dict(zip(calls, answers, strict=True))


COMMON = {"sagemaker_submit_directory", "sagemaker_job_name", "sagemaker_region"}


def but_common(given: dict[str, str]) -> dict[str, Any]:
    return {key: json.loads(value) for key, value in given.items() if key not in COMMON}


@pytest.mark.parametrize(
    ("name", "options", "instance"),
    [
        ("PyTorch", OPTIONS, "ml.p4d.24xlarge"),
        ("TensorFlow", "", "ml.p4d.24xlarge"),
        ("own image", "", "ml.c5.xlarge"),
    ],
)
def test_the_toolkits_jobs_are_what_sdk_2_sends(
    sdk_2: dict[str, Any], name: str, options: str, instance: str
) -> None:
    """The other tests give these hyperparameters to the toolkit."""
    given = {
        "sagemaker_mpi_num_of_processes_per_host": None,
        "sagemaker_instance_type": instance,
        "sagemaker_distributed_dataparallel_custom_mpi_options": options,
        "model_dir": "s3://bucket/job/model" if name == "TensorFlow" else None,
    }
    expected = but_common(parameters("train.py", **given))
    assert but_common(sdk_2[name]["hyperparameters"]) == expected


def test_sdk_1s_hyperparameter_is_sent_on(sdk_2: dict[str, Any]) -> None:
    sent = sdk_2["as SDK 1"]["hyperparameters"]
    assert sent["sagemaker_distributed_dataparallel_enabled"] == "true"


def test_the_estimator_of_this_machine_adds_the_same(sdk_2: dict[str, Any]) -> None:
    for name, kind, distribution in (
        ("PyTorch", PyTorch, WITH_OPTIONS),
        ("TensorFlow", TensorFlow, DATA_PARALLEL),
        ("HuggingFace", HuggingFace, DATA_PARALLEL),
    ):
        ours = kind(entry_point="train.py", distribution=distribution).hyperparameters()
        ours["sagemaker_instance_type"] = "ml.p4d.24xlarge"
        sent = but_common(sdk_2[name]["hyperparameters"])
        assert ours.items() <= sent.items()


def test_both_frameworks_of_hugging_face_have_the_same_words(sdk_2: dict[str, Any]) -> None:
    versions = {key: value for key, value in BOTH_FRAMEWORKS.items() if key.endswith("_version")}
    with pytest.raises(ValueError) as caught:
        HuggingFace(entry_point="train.py", **versions)
    assert str(caught.value) == sdk_2["both frameworks"]["error"]


@pytest.mark.parametrize("name", BAD)
def test_bad_distributions_have_the_same_words(sdk_2: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError) as caught:
        PyTorch(entry_point="train.py", distribution=BAD[name])
    assert str(caught.value).startswith(sdk_2[name]["error"])


@pytest.mark.skipif(bool(reason := reason_against(TOOLKIT)), reason=reason)
def test_a_model_trainer_of_sdk_3(tmp_path: Path) -> None:
    """Its own container scripts run our driver on two hosts of two ranks."""
    given = {
        "hosts": 2,
        "script": "all_reduce.py",
        "hyperparameters": {"epochs": 2, "text": "a b"},
        "distributed": {"process_count_per_node": 2, "custom_mpi_options": "-x TEST_GIVEN=1"},
    }
    channels = tmp_path / "channels"
    channels.mkdir()
    line = [str(HERE / "sdk3.py"), str(channels), str(SCRIPTS), json.dumps(given)]
    said = python("sdk3", *line)
    job = Job(said["hyperparameters"], hosts=2, command=said["command"], data=channels)
    (tmp_path / "job").mkdir()
    ended = run_job(job, TOOLKIT, tmp_path / "job")
    assert ended.codes == [0, 0], "\n".join(ended.logs)
    found = [path for ml in ended.ml for path in (ml / "model").glob("*.json")]
    ranks = {path.stem: json.loads(path.read_text()) for path in found}
    assert sorted(ranks) == ["0", "1", "2", "3"]
    assert [ranks[rank]["host"] for rank in "0123"] == ["algo-1"] * 2 + ["algo-2"] * 2
    assert {rank["sum"] for rank in ranks.values()} == {10.0}
    assert ranks["3"]["arguments"] == {"epochs": 2, "text": "a b"}
    assert ranks["3"]["environment"]["TEST_GIVEN"] == "1"
