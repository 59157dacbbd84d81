"""What the shell of a job says of something else does not reach the job's ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdp_plugins.sagemaker import PyTorch
from tests.sagemaker.distributions import DATA_PARALLEL
from tests.sagemaker.jobs import PROCESSES, fitted

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}


@pytest.mark.parametrize(
    "stray",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "SDP_JOB_ID": "x",
            "MASTER_ADDR": "far",
            "LOCAL_RANK": "0",
        },
        SLURM,
        OPEN_MPI,
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"RANK": "1"},
    ],
    ids=["by hand", "torchrun", "srun", "mpirun", "mpiexec", "half"],
)
def test_all_ranks_start_where_another_launcher_has_started_this_process(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, stray: dict[str, str]
) -> None:
    """They would take this process for a rank, and train with one of them."""
    for name, value in stray.items():
        monkeypatch.setenv(name, value)
    ranks = fitted(
        tmp_path,
        source,
        instance_count=2,
        hyperparameters={PROCESSES: 2},
        distribution=DATA_PARALLEL,
    )
    assert sorted(ranks) == ["0", "1", "2", "3"]
    assert {rank["environment"]["MASTER_ADDR"] for rank in ranks.values()} == {"127.0.0.1"}


def test_a_ranks_variables_are_its_own_jobs(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another job, left in a shell or a SageMaker container, would be believed."""
    for name in ("SM_CHANNEL_OLD", "SM_HP_LR", "SM_MASTER_PORT", "SMDATAPARALLEL_SERVER_ADDR"):
        monkeypatch.setenv(name, "1234")
    for name in ("SAGEMAKER_JOB_NAME", "TRAINING_JOB_NAME", "TRAINING_JOB_ARN"):
        monkeypatch.setenv(name, "other")
    monkeypatch.setenv("SAGEMAKER_ADMIN_CONFIG_OVERRIDE", "x")  # of no job
    ranks = fitted(
        tmp_path, source, distribution=DATA_PARALLEL, environment={"SM_HP_MINE": "wanted"}
    )
    found = ranks["0"]["environment"]
    stale = {"SM_CHANNEL_OLD", "SM_HP_LR", "SM_MASTER_PORT", "SMDATAPARALLEL_SERVER_ADDR"}
    assert not stale & set(found)
    assert not {"SAGEMAKER_JOB_NAME", "TRAINING_JOB_ARN"} & set(found)
    assert found["TRAINING_JOB_NAME"].startswith("sdp-training-")
    assert found["MASTER_PORT"] != "1234"
    assert found["SAGEMAKER_ADMIN_CONFIG_OVERRIDE"] == "x" and found["SM_HP_MINE"] == "wanted"


def test_a_single_process_keeps_the_users_variables(tmp_path: Path, source: Path) -> None:
    """Also those that begin like a variable of a rank."""
    given = {"LOCAL_DATA": "/data", "GROUP_NAME": "a", "MASTER_KEY": "b"}
    found = fitted(tmp_path, source, environment=given)["alone"]["environment"]
    assert given.items() <= found.items()
    assert not {"LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SDP_JOB_ID"} & set(found)


def test_ranks_of_two_hosts_meet_without_alarm(tmp_path: Path) -> None:
    (tmp_path / "meet.py").write_text(
        "import numpy as np\nfrom sdp_plugins.core import Group\n"
        "with Group.from_env() as group:\n"
        "    ones = np.ones(3, np.float32)\n    group.all_reduce(ones)\n    assert ones[0] == 2\n"
    )
    PyTorch(
        entry_point=str(tmp_path / "meet.py"),
        instance_count=2,
        distribution=DATA_PARALLEL,
        environment={"PYTHONWARNINGS": "error::UserWarning"},
        output_path=str(tmp_path / "out"),
    ).fit()


def test_modules_of_the_current_folder_do_not_shadow_pythons_own(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "typing.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path / "here")
    assert sorted(fitted(tmp_path, source, instance_count=2, distribution=DATA_PARALLEL))
