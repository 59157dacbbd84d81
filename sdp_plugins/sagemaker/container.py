"""The contents of SageMaker's containers, in folders of this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdp_plugins.sagemaker.artifacts import UNFINISHED

INTERFACE = "lo"
GROUP = "homogeneousCluster"


@dataclass(frozen=True)
class Container:
    """One instance of a job.

    Attributes:
        ml: The folder that is /opt/ml in SageMaker.
        hosts: Names of all instances.
        host: Name of this instance.
        instance_type: The user's argument.
        given: All hyperparameters, decoded.
        channels: Names and folders of the job's data.
        entry_point: The script, relative to the source's folder.
        framework: The module that runs the script in SageMaker.
        gpus: Number of GPUs.
    """

    ml: Path
    hosts: Sequence[str]
    host: str
    instance_type: str
    given: Mapping[str, Any]
    channels: Mapping[str, Path]
    entry_point: str
    framework: str
    gpus: int

    @property
    def data(self) -> Path:
        """The folder of the channels."""
        return self.ml / "input" / "data"

    @property
    def code(self) -> Path:
        """The folder in which the script runs."""
        return self.ml / "code"

    @property
    def model(self) -> Path:
        """The folder to which the script writes its model."""
        return self.ml / "model"

    @property
    def output(self) -> Path:
        """The folder of other output, which the script writes to `data` in it."""
        return self.ml / "output"

    def prepare(self, source: Path, dependencies: Sequence[Path] = ()) -> None:
        """Make its folders: code (a folder or a script) is copied, and dependencies beside it.

        The channels are links.
        """
        for folder in (self.model, self.output / "data", self.output / "intermediate"):
            folder.mkdir(parents=True)
        if source.is_dir():
            shutil.copytree(
                source, self.code, ignore=self._but_ourselves, ignore_dangling_symlinks=True
            )
        else:
            self.code.mkdir()
            shutil.copy(source, self.code)
        for path in dependencies:
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, self.code / path.name)
        self.data.mkdir(parents=True)
        for channel, folder in self.channels.items():
            (self.data / channel).symlink_to(folder, target_is_directory=True)
        config = self.data.parent / "config"
        config.mkdir()
        encoded = {key: json.dumps(value) for key, value in self.given.items()}
        (config / "hyperparameters.json").write_text(json.dumps(encoded))
        (config / "resourceconfig.json").write_text(json.dumps(self.resources()))
        (config / "inputdataconfig.json").write_text(json.dumps(self.inputs()))

    def fail(self, reason: str) -> None:
        """Write the file from which SageMaker reads why a job failed."""
        (self.output / "failure").write_text(reason)

    def _but_ourselves(self, folder: str, names: list[str]) -> list[str]:
        """Names not to copy: the job's own folder, and unfinished archives of other jobs."""
        job = self.ml.parent.parent
        return [
            name
            for name in names
            if name.endswith(UNFINISHED) or job == Path(folder).resolve() / name
        ]

    def resources(self) -> dict[str, Any]:
        """The content of resourceconfig.json."""
        group = {
            "instance_group_name": GROUP,
            "instance_type": self.instance_type,
            "hosts": [*self.hosts],
        }
        return {
            "current_host": self.host,
            "hosts": [*self.hosts],
            "network_interface_name": INTERFACE,
            "current_instance_type": self.instance_type,
            "current_group_name": GROUP,
            "instance_groups": [group],
        }

    def inputs(self) -> dict[str, Any]:
        """The content of inputdataconfig.json."""
        one = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}
        return dict.fromkeys(self.channels, one)
