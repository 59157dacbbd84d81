"""The folder in which a job runs: gone with the job, and with the program that runs the job."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CLEANUP = Path(__file__).with_name("cleanup.py")


@contextmanager
def job_folder(name: str) -> Iterator[Path]:
    """A temporary folder, which a process of its own removes should this one be killed.

    Args:
        name: What the folder's begins with.
    """
    folder = tempfile.TemporaryDirectory(prefix=f"{name}-")
    path = Path(folder.name).resolve()
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(_CLEANUP), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # what ends a terminal's or a notebook's processes is not for it
    ) as cleanup:
        try:
            yield path
        finally:
            folder.cleanup()
            cleanup.communicate(b"done\n")
