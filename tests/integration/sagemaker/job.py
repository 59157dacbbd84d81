"""A training job as SageMaker runs one, on hosts that this machine plays."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.sagemaker import open_mpi_5
from tests.integration.sagemaker.hosts import in_sandbox, name

SCRIPTS = Path(__file__).parent / "scripts"
SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
JOB_LIMIT_S = 240.0
MODULES = {
    "pytorch": "sagemaker_pytorch_container.training:main",
    "tensorflow": "sagemaker_tensorflow_container.training:main",
}


@dataclass(frozen=True)
class Job:
    """What a user and the SDK say of a job.

    Attributes:
        hyperparameters: As the SDK sends them: each one is encoded as JSON already.
        hosts: How many.
        source: The folder that the SDK would have put into an archive.
        channels: Channel's name: file's name: its text.
        framework: Whose toolkit runs it.
        mpi: Prefix of an Open MPI 5; empty: Debian's 4.1.
        environment: What the user gave to the estimator as `environment`.
        command: What the container runs; the toolkit's `train`, unless the SDK says otherwise.
        data: A folder of more channels.
    """

    hyperparameters: Mapping[str, str]
    hosts: int = 1
    source: Path = SCRIPTS
    channels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    framework: str = "pytorch"
    mpi: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ("train",)
    data: Path | None = None


@dataclass(frozen=True)
class Ended:
    """What is left of a job.

    Attributes:
        codes: Exit codes of the hosts' containers; None: was still running when it was ended.
        logs: What the hosts printed.
        ml: Their /opt/ml.
    """

    codes: list[int | None]
    logs: list[str]
    ml: list[Path]

    @property
    def failure(self) -> str:
        """What the job says about its failure, on its first host."""
        path = self.ml[0] / "output" / "failure"
        return path.read_text() if path.exists() else ""


def parameters(program: str, processes: int = 2, **others: object) -> dict[str, str]:
    """The hyperparameters of a job with smdistributed's data-parallel distribution.

    Args:
        program: The entry point.
        processes: On each host; SageMaker says it for MPI's jobs, else it is the number of GPUs.
        **others: The script's and the toolkit's; None leaves one out.
    """
    found = {
        "sagemaker_program": program,
        "sagemaker_submit_directory": "/opt/ml/input/data/code",
        "sagemaker_container_log_level": 20,
        "sagemaker_job_name": "job",
        "sagemaker_region": "us-east-1",
        "sagemaker_instance_type": "ml.c5.xlarge",
        "sagemaker_distributed_dataparallel_enabled": True,
        "sagemaker_distributed_dataparallel_custom_mpi_options": "",
        "sagemaker_mpi_num_of_processes_per_host": processes,
        **others,
    }
    return {key: json.dumps(value) for key, value in found.items() if value is not None}


def run_job(job: Job, toolkit: Path, folder: Path) -> Ended:
    """Run a job to its end.

    Args:
        job: What to run.
        toolkit: Prefix of the environment in which the toolkit and this package are installed.
        folder: An empty one, for the hosts' folders.

    Raises:
        subprocess.TimeoutExpired: It takes longer than `JOB_LIMIT_S`; its hosts are gone.
    """
    names = [name(host) for host in range(job.hosts)]
    for host in names:
        write_container(folder / host / "ml", job, names, host)
    image = open_mpi_5.installed(job.mpi, folder) if job.mpi else {}
    key = ["ssh-keygen", "-q", "-t", "rsa", "-m", "PEM", "-N", "", "-f", str(folder / "key")]
    subprocess.run(key, check=True)
    line = in_sandbox(folder, job.command)
    env = environment(job, toolkit, image)
    subprocess.run(line, env=env, timeout=JOB_LIMIT_S, check=False)
    return Ended(
        codes=json.loads((folder / "codes").read_text()),
        logs=[(folder / host / "log").read_text() for host in names],
        ml=[folder / host / "ml" for host in names],
    )


def environment(job: Job, toolkit: Path, image: Mapping[str, str]) -> dict[str, str]:
    """What a container's process finds: the image's variables, SageMaker's, and the user's."""
    return {
        "HOME": "/root",
        "LD_LIBRARY_PATH": "",
        "SAGEMAKER_TRAINING_MODULE": MODULES[job.framework],
        "TRAINING_JOB_NAME": "job",
        "AWS_REGION": "us-east-1",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **image,
        "PATH": ":".join([str(toolkit / "bin"), *filter(None, [image.get("PATH")]), SYSTEM]),
        **job.environment,
    }


def write_container(ml: Path, job: Job, hosts: list[str], host: str) -> None:
    """What SageMaker mounts as /opt/ml."""
    config = ml / "input" / "config"
    config.mkdir(parents=True)
    for folder in ("model", "output/data", "code"):
        (ml / folder).mkdir(parents=True)
    channels = {**job.channels, "code": {}}
    resources = {
        "current_host": host,
        "hosts": hosts,
        "network_interface_name": "eth0",
        "current_instance_type": "ml.c5.xlarge",
        "current_group_name": "homogeneousCluster",
        "instance_groups": [
            {
                "instance_group_name": "homogeneousCluster",
                "instance_type": "ml.c5.xlarge",
                "hosts": hosts,
            }
        ],
    }
    (config / "hyperparameters.json").write_text(json.dumps(dict(job.hyperparameters)))
    (config / "resourceconfig.json").write_text(json.dumps(resources))
    (config / "inputdataconfig.json").write_text(json.dumps({key: {} for key in channels}))
    data = ml / "input" / "data"
    shutil.copytree(job.data, data) if job.data else shutil.copytree(job.source, data / "code")
    for channel, files in job.channels.items():
        (data / channel).mkdir()
        for file, text in files.items():
            (data / channel / file).write_text(text)
