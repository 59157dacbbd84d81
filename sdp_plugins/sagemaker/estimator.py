"""Estimators that run jobs on this machine, with the interface of SageMaker's SDK."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdp_plugins.launch.rank_count import count_gpus
from sdp_plugins.sagemaker import artifacts, hyperparameters
from sdp_plugins.sagemaker.arguments import OF_FIT, known_to, warn_of_unknown
from sdp_plugins.sagemaker.container import Container
from sdp_plugins.sagemaker.distribution import (
    EXAMPLE,
    PROCESSES,
    added_hyperparameters,
    variables_for_mpirun,
)
from sdp_plugins.sagemaker.inputs import existing, folder_of, read_channels
from sdp_plugins.sagemaker.job_folder import check_name, job_folder, new_name
from sdp_plugins.sagemaker.metrics import Metrics
from sdp_plugins.sagemaker.process import run
from sdp_plugins.sagemaker.rank import command_line, write_script
from sdp_plugins.sagemaker.variables import variables

log = logging.getLogger(__name__)

LOCAL = ("local", "local_cpu", "local_gpu")


class TrainingJobError(RuntimeError):
    """Raised when a job's script has failed.

    Attributes:
        exit_code: Exit code of the rank that failed first; 128 + n if signal n ended it.
        failure: The failure reason, as SageMaker shows it for a failed job.
    """

    def __init__(self, job: str, exit_code: int, failure: str) -> None:
        super().__init__(f"training job {job} failed with exit code {exit_code}. Reason: {failure}")
        self.exit_code = exit_code
        self.failure = failure


class Estimator:
    """A training job on this machine: no AWS account, no Docker, this Python's packages.

    The arguments are those of SageMaker's SDK. Those without an effect here (role, image_uri,
    volume_size, framework_version, ...) are accepted and ignored.

    Args:
        entry_point: The script; in `source_dir`, if that is given.
        source_dir: A folder of code, which is copied.
        instance_count: Number of hosts to emulate, each with its own folders and variables.
        instance_type: "local", "local_cpu" or "local_gpu".
        hyperparameters: The script's arguments. `sagemaker_mpi_num_of_processes_per_host` sets the
            number of ranks of a host; default: the number of GPUs, or 1.
        distribution: As for the SDK; `{"smdistributed": {"dataparallel": {"enabled": True}}}`.
        environment: Variables for the script.
        output_path: `file://FOLDER` for JOB_NAME/output/model.tar.gz; default: a new folder in
            /tmp. `model_data` is the path of the model.
        base_job_name: The beginning of the job's name.
        dependencies: More folders and files, copied beside the code.
        metric_definitions: As for the SDK, `[{"Name": ..., "Regex": ...}]`. After `fit`, `metrics`
            has the numbers that the first group of each has matched in the job's output.
        **others: Accepted and ignored, for scripts that are written for the SDK.

    Raises:
        ValueError: An argument is invalid; the text is the SDK's if it has one.
    """

    framework = ""

    def __init__(
        self,
        entry_point: str,
        source_dir: str | None = None,
        instance_count: int = 1,
        instance_type: str = "local",
        hyperparameters: Mapping[str, Any] | None = None,
        distribution: object = None,
        environment: Mapping[str, str] | None = None,
        output_path: str | None = None,
        base_job_name: str | None = None,
        dependencies: Sequence[str] = (),
        metric_definitions: Sequence[Mapping[str, str]] | None = None,
        **others: object,
    ) -> None:
        if instance_type not in LOCAL:
            raise ValueError(
                f"instance_type {instance_type!r} is not on this machine. Hint: use one of "
                f"{', '.join(LOCAL)}; for instances of AWS use the estimator of SageMaker's SDK."
            )
        if not isinstance(instance_count, int) or instance_count < 1:
            raise ValueError(f"instance_count must be 1 or more, not {instance_count!r}")
        if instance_type == "local_gpu" and not count_gpus():
            log.warning("instance_type 'local_gpu': this machine has no /dev/nvidia*, so no GPU")
        if output_path:
            folder_of(output_path)  # fail before the training
        self.entry_point = entry_point
        self.source_dir = source_dir
        self.instance_count = instance_count
        self.instance_type = instance_type
        self.environment = {str(name): str(value) for name, value in (environment or {}).items()}
        self.output_path = output_path
        self.base_job_name = base_job_name or "sdp-training"
        self.model_data: str | None = None
        self.metric_definitions = metric_definitions
        self.metrics: dict[str, list[float]] = Metrics(metric_definitions).values
        self.distribution = distribution
        self._given = dict(hyperparameters or {})
        self._added = added_hyperparameters(distribution, instance_type, self._given)
        if instance_count > 1 and not self._added:
            raise ValueError(
                f"{instance_count} hosts would each run the whole job. Hint: {EXAMPLE}"
            )
        self.dependencies = [existing(path) for path in dependencies]
        warn_of_unknown(others, known_to(type(self)))

    def hyperparameters(self) -> dict[str, Any]:
        """The script's hyperparameters, and those that the distribution adds."""
        return {**self._given, **self._added}

    def set_hyperparameters(self, **more: Any) -> None:
        """Add or change hyperparameters for the next job."""
        self._given |= more
        if self.distribution is None:  # a hyperparameter may replace it
            self._added = added_hyperparameters(None, self.instance_type, self._given)

    def fit(
        self,
        inputs: str | Mapping[str, str] | None = None,
        wait: bool = True,
        logs: object = "All",
        job_name: str | None = None,
        **others: object,
    ) -> None:
        """Run the job to its end.

        Its output is printed as it arrives, each line with its rank. Afterwards `model_data` is the
        path of the archive of SM_MODEL_DIR.

        Args:
            inputs: `file://FOLDER` for the channel "training", or folders by channel name.
            wait: Ignored: `fit` always waits.
            logs: "None" or False prints nothing.
            job_name: A name without archives of an earlier job; default: a new name.
            **others: Accepted and ignored, for scripts that are written for the SDK.

        Raises:
            ValueError: The script does not exist, a channel is not a folder of this machine, or
                another job has this name.
            TrainingJobError: A rank failed.
        """
        name = job_name or new_name(self.base_job_name)
        check_name(name)
        warn_of_unknown(others, OF_FIT, "fit")
        channels, source = read_channels(inputs), self._source()
        metrics = Metrics(self.metric_definitions)
        self.model_data, self.metrics = None, metrics.values
        with artifacts.claimed(self.output_path, name) as output, job_folder(name) as folder:
            containers = self._containers(folder, name, channels)
            for container in containers:
                container.prepare(source, self.dependencies)
                write_script(container.ml.parent, *self._script_of(container))
            code, words = self._run(folder, containers, metrics, logs in (False, None, "None"))
            if code:
                containers[0].fail(words)
            if not code or output:
                archives = output or Path(tempfile.mkdtemp(prefix=f"{name}-"), "output")
                archives.mkdir(exist_ok=True)
                self._pack(containers, archives, failed=bool(code))
        if code:
            raise TrainingJobError(name, code, words)

    def _run(
        self, folder: Path, containers: Sequence[Container], metrics: Metrics, quiet: bool
    ) -> tuple[int, str]:
        """Run the script on all hosts; its exit code, and the reason of a failure."""
        processes = self._processes(containers[0]) if self._added else 0
        ranks = max(1, processes * len(containers))
        code, words = run(folder, ranks, processes, quiet, metrics.read)
        if not quiet:
            print(*metrics.summary(), sep="\n", end="\n" if metrics.values else "", flush=True)
        return code, words

    def _processes(self, container: Container) -> int:
        """The number of ranks of a host.

        Raises:
            ValueError: The user's number is invalid.
        """
        given = container.given.get(PROCESSES) or container.gpus or 1
        if not isinstance(given, int) or given < 1:
            raise ValueError(f"{PROCESSES} must be a number of 1 or more, not {given!r}")
        return given

    def _pack(self, containers: list[Container], folder: Path, failed: bool) -> None:
        """Pack the script's output; a failed job leaves no model, as on SageMaker."""
        artifacts.pack(folder / artifacts.OUTPUT, [container.output for container in containers])
        if not failed:
            artifacts.pack(folder / artifacts.MODEL, [container.model for container in containers])
            self.model_data = f"file://{folder / artifacts.MODEL}"

    def _script_of(self, container: Container) -> tuple[list[str], dict[str, str]]:
        """The command line and the variables of a container's ranks."""
        given = hyperparameters.of_the_script(container.given)
        line = command_line(container.code, self._script(), hyperparameters.arguments(given))
        of_mpirun = variables_for_mpirun(self._added)
        return line, {**variables(container), **of_mpirun, **self.environment}

    def _source(self) -> Path:
        """The folder of code, or the script.

        Raises:
            ValueError: It does not exist.
        """
        folder = folder_of(self.source_dir or ".")
        if not folder.is_dir():
            raise ValueError(f"source_dir: there is no folder {folder}")
        script = folder / self.entry_point
        if not script.is_file():
            raise ValueError(f"there is no script {self.entry_point!r} in {script.parent}")
        return folder if self.source_dir else script

    def _script(self) -> str:
        return self.entry_point if self.source_dir else Path(self.entry_point).name

    def _containers(self, folder: Path, name: str, channels: dict[str, Path]) -> list[Container]:
        hosts = [f"algo-{number + 1}" for number in range(self.instance_count)]
        return [
            Container(
                ml=folder / host / "ml",
                hosts=hosts,
                host=host,
                instance_type=self.instance_type,
                given=hyperparameters.decoded(self._sent(folder / host / "ml", name)),
                channels=channels,
                entry_point=self._script(),
                framework=self.framework,
                gpus=count_gpus(),
            )
            for host in hosts
        ]

    def _sent(self, ml: Path, name: str) -> dict[str, Any]:
        """The hyperparameters that the SDK sends."""
        return {
            **self.hyperparameters(),
            "sagemaker_program": self._script(),
            "sagemaker_job_name": name,
            "sagemaker_container_log_level": 20,
        }
