"""Estimators that run SageMaker's jobs on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from sdp_plugins.sagemaker import Estimator, PyTorch, TensorFlow, TrainingJobError
from tests.leaks import child_processes, reap_orphans
from tests.ranks import HANG_S
from tests.sagemaker.distributions import BAD, DATA_PARALLEL
from tests.sagemaker.jobs import PROCESSES, SHOW, fitted, folder_of_archives

COLLECT = """
import os
import numpy
from sdp_plugins.core import Group
group = Group.from_env()
ones = numpy.ones(3)
group.all_reduce(ones)
print(f"sum={{ones[0]:.0f}};", flush=True)
if os.environ["SM_CURRENT_HOST"] == "algo-2" and os.environ["LOCAL_RANK"] == "1":
    {ending}
group.barrier()
group.close()
"""


OF_RANK_3 = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "1",
    "SMDATAPARALLEL_WORLD_RANK": "3",
    "SMDATAPARALLEL_LOCAL_RANK": "1",
    "SMDATAPARALLEL_USE_HOMOGENEOUS": "1",
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_HP_TEXT": "a  $b",
    "SM_HPS": '{"flag":true,"n":2,"text":"a  $b"}',
    "GIVEN": "1",
    "MINE": "x",
    "MASTER_ADDR": "127.0.0.1",
}
"""The variables of the last rank of a job of two ranks on each of two hosts."""


def test_two_ranks_on_each_of_two_hosts(tmp_path: Path, source: Path, data: Path) -> None:
    """Each host has folders and variables of its own, as in SageMaker."""
    distribution = {
        "smdistributed": {
            "dataparallel": {"enabled": True, "custom_mpi_options": "-verbose -x GIVEN=1 -x HOME"}
        }
    }
    ranks = fitted(
        tmp_path,
        source,
        {"training": f"file://{data}"},
        instance_count=2,
        hyperparameters={"text": "a  $b", "n": 2, "flag": True, PROCESSES: 2},
        environment={"MINE": "x"},
        distribution=distribution,
    )
    assert sorted(ranks) == ["0", "1", "2", "3"]
    last = ranks["3"]["environment"]
    assert ranks["3"]["arguments"] == ["--flag", "True", "-n", "2", "--text", "a  $b"]
    assert all(rank["data"] == "1 2 3" for rank in ranks.values())
    assert OF_RANK_3.items() <= last.items()
    parameters = json.loads(last["SM_FRAMEWORK_PARAMS"])
    assert parameters["sagemaker_distributed_dataparallel_enabled"] is True
    assert len({rank["environment"]["SM_MODEL_DIR"] for rank in ranks.values()}) == 2
    assert ranks["3"]["cwd"] == last["SM_MODULE_DIR"]
    assert not Path(ranks["3"]["cwd"]).exists()  # the job's folders are gone


def test_files_of_all_hosts_are_kept(tmp_path: Path) -> None:
    """Also those that have a folder of one name on each host, as checkpoints have."""
    (tmp_path / "write.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "for name in ('SM_MODEL_DIR', 'SM_OUTPUT_DATA_DIR'):\n"
        "    folder = Path(os.environ[name], 'step')\n"
        "    folder.mkdir(exist_ok=True)\n"
        "    (folder / os.environ['RANK']).touch()\n"
    )
    estimator = PyTorch(
        entry_point=str(tmp_path / "write.py"),
        instance_count=2,
        distribution=DATA_PARALLEL,
        output_path=str(tmp_path / "out"),
    )
    estimator.fit()
    out = folder_of_archives(estimator, tmp_path / "out")
    with tarfile.open(out / "model.tar.gz") as model, tarfile.open(out / "output.tar.gz") as output:
        assert {"step/0", "step/1"} <= {*model.getnames()}
        assert {"data/step/0", "data/step/1"} <= {*output.getnames()}


@pytest.mark.parametrize(
    "distribution",
    [
        {"mpi": {"enabled": True, "processes_per_host": 2, "custom_mpi_options": "-x GIVEN=1"}},
        {"pytorchddp": {"enabled": "True"}},
        {"torch_distributed": {"enabled": True}, "smdistributed": {}},
    ],
    ids=["mpi", "pytorchddp", "torch_distributed"],
)
def test_other_distributions_that_have_ranks(
    tmp_path: Path, source: Path, distribution: dict[str, Any]
) -> None:
    by_mpi = "mpi" in distribution
    given = {} if by_mpi else {PROCESSES: 2}
    ranks = fitted(
        tmp_path, source, instance_count=2, hyperparameters=given, distribution=distribution
    )
    assert [ranks[rank]["environment"]["SM_CURRENT_HOST"][-1] for rank in "0123"] == [*"1122"]
    assert {rank["environment"].get("GIVEN") for rank in ranks.values()} == {
        "1" if by_mpi else None
    }


def test_a_job_without_ranks(tmp_path: Path, source: Path) -> None:
    ranks = fitted(tmp_path, source)
    assert sorted(ranks) == ["alone"]
    assert "WORLD_SIZE" not in ranks["alone"]["environment"]


def test_dependencies(tmp_path: Path, source: Path) -> None:
    (tmp_path / "lib" / "mine").mkdir(parents=True)
    (tmp_path / "lib" / "mine" / "__init__.py").write_text("ANSWER = 42")
    (source / "use.py").write_text(f"import mine\nassert mine.ANSWER == 42\n{SHOW}")
    dependencies = [str(tmp_path / "lib" / "mine")]
    assert fitted(tmp_path, source, entry_point="use.py", dependencies=dependencies)


def test_a_shells_script(tmp_path: Path, source: Path) -> None:
    found = fitted(
        tmp_path,
        source,
        entry_point="run.sh",
        hyperparameters={"text": "a 'b' $c"},
        environment={"PYTHON": sys.executable},
        distribution=DATA_PARALLEL,
    )
    assert found["0"]["arguments"] == ["--text", "a 'b' $c"]


@pytest.mark.parametrize(
    ("model_dir", "expected"), [(None, "{SM_MODEL_DIR}"), ("s3://b", "s3://b"), (False, "")]
)
def test_tensorflows_model_dir(tmp_path: Path, source: Path, model_dir: Any, expected: str) -> None:
    (found,) = fitted(tmp_path, source, framework=TensorFlow, model_dir=model_dir).values()
    expected = expected.format(**found["environment"])
    assert found["arguments"] == (["--model_dir", expected] if expected else [])


def job(source: Path, ending: str) -> PyTorch:
    (source / "train.py").write_text(COLLECT.format(ending=ending))
    return PyTorch(
        entry_point=str(source / "train.py"),
        instance_count=2,
        hyperparameters={PROCESSES: 2},
        distribution=DATA_PARALLEL,
        output_path=f"file://{source / 'out'}",
    )


@pytest.mark.parametrize(
    ("ending", "code", "reason"),
    [
        ("raise KeyError('no such word')", 1, "rank 3 .*KeyError: 'no such word'"),
        ("os.kill(os.getpid(), 9)", 137, "rank 3 .*SIGKILL"),
        ("os._exit(3)", 3, "rank 3 .*exit code 3"),
    ],
)
def test_a_rank_that_fails(
    source: Path, capfd: pytest.CaptureFixture[str], ending: str, code: int, reason: str
) -> None:
    with pytest.raises(TrainingJobError, match=f"(?s){reason}") as caught:
        job(source, ending).fit()
    assert caught.value.exit_code == code
    assert caught.value.failure.startswith("smddprun: rank 3 ")  # not in what the ranks have said
    (out,) = (source / "out").glob("sdp-training-*/output")
    assert {path.name for path in out.iterdir()} == {"output.tar.gz"}  # and no model
    with tarfile.open(out / "output.tar.gz") as archive:
        failure = archive.extractfile("failure")
        assert failure and failure.read().decode() == caught.value.failure
    assert capfd.readouterr().out.count("sum=4;") == 4


def test_quiet(source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job(source, "pass").fit(logs="None")
    assert capfd.readouterr().out == ""


INTERRUPTED = """
import sys
from sdp_plugins.sagemaker import PyTorch
PyTorch(entry_point=sys.argv[1], distribution={"mpi": {"enabled": True}}).fit()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_goes_on_without_the_program(tmp_path: Path, number: int) -> None:
    """Ctrl-C in a notebook ends the job; so does the notebook's own end."""
    (tmp_path / "sleep.py").write_text(
        "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    )
    line = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "sleep.py")]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, text=True
    ) as program:
        assert program.stdout
        lines = iter(program.stdout)
        pid = next(int(line.split()[-1]) for line in lines if line.split()[-1].isdecimal())
        program.send_signal(number)
        program.wait(timeout=HANG_S)
    deadline = time.monotonic() + HANG_S
    while still_there(tmp_path, pid) and time.monotonic() < deadline:
        time.sleep(0.05)
        reap_orphans()
    assert not still_there(tmp_path, pid)


def still_there(folder: Path, pid: int) -> list[object]:
    """A rank, the job's folder, which holds a copy of the code, and who removes that."""
    rank = Path(f"/proc/{pid}")
    sweepers = [line for line in child_processes().values() if str(folder) in line]
    return [*folder.glob("sdp-training-*"), *sweepers, *([rank] if rank.exists() else [])]


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no dictionary", "smdistributed strategy requires a dictionary"),
        ("two strategies", "Cannot use more than 1 smdistributed strategy"),
        ("misspelt", "Invalid smdistributed strategy provided: dataparalel"),
    ],
)
def test_distributions_that_the_sdk_refuses(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PyTorch(entry_point="train.py", distribution=BAD[name])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"distribution": []}, "must be a dictionary"),
        ({"distribution": {"smdistribute": {}}}, "Invalid distribution strategy"),
        ({"distribution": {"parameter_server": {"enabled": True}}}, "not supported on this"),
        ({"distribution": {"smdistributed": {"modelparallel": {}}}}, "not supported on this"),
        ({"distribution": {**DATA_PARALLEL, "mpi": {"enabled": True}}}, "more than 1"),
        ({"instance_type": "ml.c5.xlarge"}, "not on this machine"),
        ({"instance_count": 0}, "1 or more"),
        ({"dependencies": ["/nowhere"]}, "there is no /nowhere"),
        ({"instance_count": "2"}, "1 or more, not '2'"),
        ({"output_path": "s3://bucket/out"}, "not on this machine"),
        ({"instance_count": 2}, "Hint: distribution="),
        ({"distribution": {"mpi": {"enabled": True, "custom_mpi_options": ["-x"]}}}, "a string"),
    ],
)
def test_arguments_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Estimator(entry_point="train.py", **options)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ("s3://bucket/data", "not on this machine. Hint: download"),
        ({"test": "file:///nowhere"}, "channel 'test': there is no folder /nowhere"),
        ({"my/test": "file:///tmp"}, "letters, digits"),
    ],
)
def test_channels_that_are_refused(source: Path, inputs: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PyTorch(entry_point="show.py", source_dir=str(source)).fit(inputs)


def test_what_is_refused_before_anything_is_trained(source: Path) -> None:
    estimator = PyTorch(entry_point="show.py", source_dir=str(source), output_path="/dev/null/out")
    with pytest.raises(ValueError, match="output_path /dev/null/out: Not a directory"):
        estimator.fit()
    with pytest.raises(ValueError, match="job_name 'a/b'"):
        estimator.fit(job_name="a/b")
    for wrong in (-1, "x"):
        given = {PROCESSES: wrong}
        with pytest.raises(ValueError, match=f"{PROCESSES} must be a number"):
            PyTorch(
                entry_point=str(source / "show.py"),
                hyperparameters=given,
                distribution=DATA_PARALLEL,
            ).fit()


SAVES = """
import pathlib, sys, time
try:
    print("begun", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    pathlib.Path(sys.argv[2]).touch()
"""
FITS = """
import sys
from sdp_plugins.sagemaker import PyTorch
PyTorch(
    entry_point=sys.argv[1], hyperparameters={"saved": sys.argv[2]},
    distribution={"mpi": {"enabled": True}},
).fit()
"""


def test_scripts_may_save_at_ctrl_c(tmp_path: Path) -> None:
    """A terminal's Ctrl-C goes to the whole group of processes."""
    (tmp_path / "save.py").write_text(SAVES)
    saved = tmp_path / "saved"
    line = [sys.executable, "-c", FITS, str(tmp_path / "save.py"), str(saved)]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        line, stdout=pipe, stderr=null, text=True, start_new_session=True
    ) as program:
        assert program.stdout
        assert any("begun" in text for text in program.stdout)
        os.killpg(program.pid, signal.SIGINT)
        program.communicate(timeout=HANG_S)
    assert saved.exists()


def test_a_daemon_of_a_script_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text(
        "import subprocess\nsubprocess.Popen(['sleep', '900'])\nprint('left')"
    )
    PyTorch(entry_point=str(tmp_path / "leave.py"), output_path=str(tmp_path / "out")).fit()


def test_a_script_that_is_not_there(source: Path) -> None:
    with pytest.raises(ValueError, match=r"source_dir: there is no folder .*/surce$"):
        PyTorch(entry_point="show.py", source_dir=str(source.parent / "surce")).fit()
    with pytest.raises(ValueError, match=r"no script 'shw\.py'"):
        PyTorch(entry_point="shw.py", source_dir=str(source)).fit()
