"""What is left of a job, where SageMaker leaves it: OUTPUT/JOB_NAME/output/model.tar.gz."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sdp_plugins.sagemaker.inputs import made

MODEL, OUTPUT = "model.tar.gz", "output.tar.gz"
UNFINISHED = ".unfinished"


@contextmanager
def claimed(address: str | None, job: str) -> Iterator[Path | None]:
    """The folder for a job's archives, which no other job gets; gone again if it stays empty.

    Args:
        address: The estimator's `output_path`; None: there is no folder.
        job: The job's name.

    Raises:
        ValueError: It cannot be made, or a job of this name has it.
    """
    if not address:
        yield None
        return
    folder = made(address) / job / "output"
    try:
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir()
    except FileExistsError:
        raise ValueError(
            f"job_name {job!r}: there was a job of this name, see {folder}. Hint: names are used "
            "once, as on SageMaker; without one, one is made."
        ) from None
    except OSError as error:
        raise ValueError(f"output_path {address}: {error.strerror}") from None
    try:
        yield folder
    finally:
        with suppress(OSError):  # there is something in it
            folder.rmdir()
            folder.parent.rmdir()


def pack(archive: Path, folders: Sequence[Path]) -> None:
    """Pack what is in the folders of all hosts, one over the other: of two equal names the last.

    The archive appears when it is complete: whoever sees it may read it.

    Args:
        archive: The file to make.
        folders: One of each host.
    """
    found = {path.relative_to(folder): path for folder in folders for path in folder.rglob("*")}
    unfinished = archive.with_name(archive.name + UNFINISHED)
    try:
        with tarfile.open(unfinished, "w:gz") as tar:
            for name in sorted(found):
                tar.add(found[name], arcname=str(name), recursive=False)
        os.replace(unfinished, archive)
    finally:
        unfinished.unlink(missing_ok=True)
