"""What is left of a job: model.tar.gz and output.tar.gz, as SageMaker packs them."""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sdp_plugins.sagemaker.container import Container


def collect(containers: Sequence[Container], folder: Path | None) -> str:
    """Pack the models and the outputs of all hosts, where files of a name are the last host's.

    Args:
        containers: The hosts'.
        folder: Where to put the archives; None: a new folder in /tmp, which stays.

    Returns:
        The address of the model's archive.
    """
    folder = folder or Path(
        tempfile.mkdtemp(prefix=f"{containers[0].given['sagemaker_job_name']}-")
    )
    folder.mkdir(parents=True, exist_ok=True)
    _pack(folder / "model.tar.gz", [container.model for container in containers])
    _pack(folder / "output.tar.gz", [container.output for container in containers])
    return f"file://{folder / 'model.tar.gz'}"


def _pack(archive: Path, folders: Sequence[Path]) -> None:
    files = {path.name: path for folder in folders for path in sorted(folder.iterdir())}
    with tarfile.open(archive, "w:gz") as tar:
        for name, path in files.items():
            tar.add(path, arcname=name)
