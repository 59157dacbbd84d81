"""The folder in which a job runs, removed with the job or the program that runs it."""

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
    """Make a temporary folder; a helper process removes it if this process is killed.

    Args:
        name: Beginning of the folder's name.
    """
    folder = tempfile.TemporaryDirectory(prefix=f"{name}-")
    path = Path(folder.name).resolve()
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(_CLEANUP), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # so that it outlives the terminal or notebook
    ) as cleanup:
        try:
            yield path
        finally:
            folder.cleanup()
            cleanup.communicate(b"done\n")
