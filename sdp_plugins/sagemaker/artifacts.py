"""The archives of a job, at SageMaker's path: OUTPUT/JOB_NAME/output/model.tar.gz."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from sdp_plugins.sagemaker.inputs import folder_of

MODEL, OUTPUT = "model.tar.gz", "output.tar.gz"
UNFINISHED = ".unfinished"


@contextmanager
def claimed(address: str | None, job: str) -> Iterator[Path | None]:
    """Make the folder for a job's archives, for this job only; removed again if it stays empty.

    The address is the estimator's `output_path`; None makes no folder.

    Raises:
        ValueError: It cannot be made, or another job has this name.
    """
    if not address:
        yield None
        return
    folder = folder_of(address) / job / "output"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except FileExistsError:
        raise ValueError(
            f"job_name {job!r}: there was a job of this name, see {folder}. Hint: job names are "
            "unique, as on SageMaker; leave job_name out to get a new one."
        ) from None
    except OSError as error:
        raise ValueError(f"output_path {address}: {error.strerror}") from None
    try:
        yield folder
    finally:
        with suppress(OSError):  # it is not empty
            folder.rmdir()
            folder.parent.rmdir()


def pack(archive: Path, folders: Sequence[Path]) -> None:
    """Pack the folders of all hosts into one archive; the last of equal names wins.

    The archive appears only when it is complete.
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
