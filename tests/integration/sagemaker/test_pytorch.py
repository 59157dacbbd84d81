"""SageMaker's toolkit for PyTorch runs jobs over this package, on one host and on two."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.sagemaker.job import Ended, Job, parameters
from tests.integration.sagemaker.requirements import reason_against
from tests.integration.sagemaker.side_jobs import End, started

TOOLKIT = Path(os.environ.get("SDP_TEST_SAGEMAKER", "")) / "pytorch"
OPEN_MPI_5 = os.environ.get("SDP_TEST_OPEN_MPI", "")
EXAMPLE = Path(__file__).parents[3] / "examples" / "sagemaker"

pytestmark = [
    pytest.mark.skipif(bool(reason := reason_against(TOOLKIT)), reason=reason),
    pytest.mark.timeout(600),
]

ARGUMENTS = {"epochs": 2, "text": "a  b $HOME 'c'"}
OPTIONS = "sagemaker_distributed_dataparallel_custom_mpi_options"
ALL_REDUCE = parameters(
    "all_reduce.py", **ARGUMENTS, **{OPTIONS: "-x TEST_GIVEN=1 --NCCL_DEBUG WARN"}
)
# As SDK 1 sent it: a hyperparameter of the user's own. The number of ranks is then the GPUs', or 1.
SDK_1 = parameters("all_reduce.py", None, sagemaker_instance_type=None, **{OPTIONS: None})
# What SDKs of some years ago send for `distribution={"pytorchddp": ...}`.
PYTORCH_DDP = parameters(
    "gloo.py", sagemaker_distributed_dataparallel_enabled=None, sagemaker_pytorch_ddp_enabled=True
)


def digits() -> str:
    """The example's file: 64 pixels and a digit in a line."""
    from sklearn.datasets import load_digits

    pairs = zip(*load_digits(return_X_y=True), strict=True)
    return "\n".join(",".join(f"{number:.0f}" for number in (*row, digit)) for row, digit in pairs)


# As an estimator gets them: see docs/sagemaker.md.
METRICS = {"train:loss": r"train_loss=(\S+);", "test:accuracy": r"test_accuracy=(\S+);"}

JOBS = {
    "two hosts": Job(ALL_REDUCE, hosts=2, channels={"training": {"a": "1"}}),
    "two hosts, Open MPI 5": Job(ALL_REDUCE, hosts=2, mpi=OPEN_MPI_5),
    "two hosts, one rank each": Job(parameters("all_reduce.py", 1, **ARGUMENTS), hosts=2),
    "two hosts, first API": Job(parameters("mnist_v1.py"), hosts=2),
    "one host": Job(ALL_REDUCE, channels={"training": {"a": "1"}}),
    "one host, Open MPI 5": Job(ALL_REDUCE, mpi=OPEN_MPI_5),
    "one host, one rank": Job(SDK_1),
    "shell": Job(parameters("run.sh", **ARGUMENTS)),
    "example": Job(
        parameters("train.py"), source=EXAMPLE, channels={"training": {"digits.csv": digits()}}
    ),
    "HuggingFace": Job(parameters("bert.py"), hosts=2),
    "not ours": Job(PYTORCH_DDP),
    "raise": Job(parameters("fail.py", how="raise")),
    "mismatch": Job(parameters("fail.py", how="mismatch"), hosts=2),
    "kill": Job(parameters("fail.py", how="kill"), hosts=2),
}


@pytest.fixture(scope="module")
def end(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[End]:
    """`end("two hosts")` waits for that job."""
    yield from started(JOBS, TOOLKIT, tmp_path_factory, request)


def said(ended: Ended) -> list[dict]:
    """What `all_reduce.py` found on each rank."""
    paths = [path for ml in ended.ml for path in (ml / "model").glob("*.json")]
    return sorted((json.loads(path.read_text()) for path in paths), key=lambda rank: rank["rank"])


def succeeded(ended: Ended) -> bool:
    assert ended.codes == [0] * len(ended.codes), "\n".join(ended.logs)
    assert ended.failure == ""
    return all((ml / "output" / "success").exists() for ml in ended.ml)


PAIRS = ["two hosts", "two hosts, Open MPI 5", "one host", "one host, Open MPI 5", "shell"]


@pytest.mark.parametrize("name", PAIRS)
def test_two_ranks_on_each_host(end: End, name: str) -> None:
    """They find each other and their scripts' arguments, character by character."""
    ended, hosts = end(name), JOBS[name].hosts
    assert succeeded(ended)
    ranks = said(ended)
    assert [rank["host"] for rank in ranks] == ["algo-1", "algo-1", "algo-2", "algo-2"][: 2 * hosts]
    assert {rank["sum"] for rank in ranks} == {sum(range(2 * hosts + 1))}
    assert all(rank["arguments"] == ARGUMENTS for rank in ranks)
    assert {rank["mpi"] for rank in ranks} == {hosts == 2}  # between hosts, not within one


@pytest.mark.parametrize("name", ["two hosts"])
def test_what_a_rank_finds(end: End, name: str) -> None:
    """SMDDP's and torchrun's variables, SageMaker's, and what the user gave to mpirun."""
    found = said(end(name))[3]["environment"]
    expected = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "SMDATAPARALLEL_WORLD_RANK": "3",
        "SMDATAPARALLEL_WORLD_SIZE": "4",
        "SMDATAPARALLEL_LOCAL_RANK": "1",
        "SMDATAPARALLEL_SERVER_ADDR": "algo-1",
        "MASTER_ADDR": "algo-1",
        "MASTER_PORT": "7777",
        "SM_CURRENT_HOST": "algo-2",
        "SM_CHANNEL_TRAINING": "/opt/ml/input/data/training",
        "TEST_GIVEN": "1",
        "NCCL_DEBUG": "WARN",
    }
    assert expected.items() <= found.items()


@pytest.mark.parametrize("name", ["two hosts, one rank each"])
def test_no_rank_is_bound_to_one_core(end: End, name: str) -> None:
    """As Open MPI 4.1 binds each of two."""
    ended = end(name)
    assert succeeded(ended)
    assert [rank["cores"] for rank in said(ended)] == [os.cpu_count()] * 2


@pytest.mark.parametrize("name", ["one host, one rank"])
def test_one_rank(end: End, name: str) -> None:
    ended = end(name)
    assert succeeded(ended)
    assert [(rank["rank"], rank["size"], rank["sum"]) for rank in said(ended)] == [(0, 1, 1.0)]


@pytest.mark.parametrize("name", ["two hosts, first API"])
def test_a_script_for_smddp_1(end: End, name: str) -> None:
    ended = end(name)
    assert succeeded(ended)
    (accuracy,) = re.findall(r"Test set: Accuracy: (\S+)", ended.logs[0])
    assert float(accuracy) > 0.9
    assert (ended.ml[0] / "model" / "mnist.pt").exists()


@pytest.mark.parametrize("name", ["example"])
def test_the_example(end: End, name: str) -> None:
    """It reads its channel, saves its model, and CloudWatch finds its metrics."""
    ended = end(name)
    assert succeeded(ended)
    assert (ended.ml[0] / "model" / "model.pt").exists()
    accuracies = re.findall(METRICS["test:accuracy"], ended.logs[0])
    assert len(accuracies) == 10
    assert float(accuracies[-1]) > 0.9


@pytest.mark.parametrize("name", ["HuggingFace"])
def test_a_script_for_huggingfaces_trainer(end: End, name: str) -> None:
    """SageMaker's variables alone make it train over smddp, on CPUs, too."""
    ended = end(name)
    assert succeeded(ended)
    said = re.findall(r"ranks=(\d); backend=(\w+); train_loss=([\d.]+);", ended.logs[0])
    assert said == [("4", "smddp", said[0][2])] * 4
    assert (ended.ml[0] / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["not ours"])
def test_jobs_that_use_something_else(end: End, name: str) -> None:
    """SageMaker puts `smddprun` before the scripts of other libraries, too."""
    ended = end(name)
    assert succeeded(ended)
    assert "smddprun" in ended.logs[0]
    assert [(ended.ml[0] / "model" / rank).read_text() for rank in "01"] == ["gloo 2.0"] * 2


@pytest.mark.parametrize("name", ["raise"])
def test_a_rank_raises(end: End, name: str) -> None:
    """The job's failure begins with what it raised, though the other rank has lost it by then."""
    ended = end(name)
    assert ended.codes == [1]
    first = re.search(r"\w+Error: .*", ended.failure)
    assert first and first[0].startswith("ValueError: the data are not what they were")


@pytest.mark.parametrize("name", ["mismatch"])
def test_our_errors_are_the_failure(end: End, name: str) -> None:
    """By their names, with the rank and the operation."""
    ended = end(name)
    assert ended.codes[0] not in (0, None)
    assert ended.failure.startswith("CollectiveMismatchError:")
    assert re.search(r"\[rank \d/4\] all_reduce", ended.failure)


@pytest.mark.parametrize("name", ["kill"])
def test_a_rank_is_killed(end: End, name: str) -> None:
    ended = end(name)
    assert ended.codes[0] not in (0, None)
    assert ended.failure.startswith("PeerLostError:")
    assert re.search(r"\[rank \d/4\] all_reduce.*: rank 3 ", ended.failure), ended.failure
