"""What is left of a job: model.tar.gz and output.tar.gz, as SageMaker packs them."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path

MODEL, OUTPUT = "model.tar.gz", "output.tar.gz"


def pack(archive: Path, folders: Sequence[Path]) -> None:
    """Pack what is in the folders of all hosts, one over the other: of two equal names the last.

    Args:
        archive: The file to make.
        folders: One of each host.
    """
    found = {path.relative_to(folder): path for folder in folders for path in folder.rglob("*")}
    with tarfile.open(archive, "w:gz") as tar:
        for name in sorted(found):
            tar.add(found[name], arcname=str(name), recursive=False)
