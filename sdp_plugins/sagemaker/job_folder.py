"""The name of a job, and the folder in which it runs."""

from __future__ import annotations

import re
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST_NAME = 63  # SageMaker's limit
# The process that runs the job holds the other end of stdin: without `done`, it was killed. The
# job's ranks are then being killed too, and may still write for some seconds.
CLEANUP = """
trap "" HUP INT TERM
read -r line || for _ in $(seq 20); do rm -rf -- "$1"; sleep 0.5; done
"""


def new_name(base: str) -> str:
    """Make a unique name, even if jobs begin within the same second; a long `base` is cut."""
    stamp = f"{time.strftime('%Y-%m-%d-%H-%M-%S')}-{secrets.token_hex(3)}"
    return f"{base[: LONGEST_NAME - len(stamp) - 1].rstrip('-')}-{stamp}"


def check_name(name: str) -> None:
    """Check a job's name.

    Raises:
        ValueError: The name is invalid.
    """
    if not re.fullmatch(r"[A-Za-z0-9](-*[A-Za-z0-9])*", name) or len(name) > LONGEST_NAME:
        raise ValueError(
            f"job_name {name!r}: a name has letters, digits and '-', {LONGEST_NAME} at most"
        )


@contextmanager
def job_folder(name: str) -> Iterator[Path]:
    """Make a temporary folder; a shell removes it if this process is killed."""
    folder = tempfile.TemporaryDirectory(prefix=f"{name}-")
    path = Path(folder.name).resolve()
    with cleanup(path) as shell:
        try:
            yield path
        finally:
            folder.cleanup()
            shell.communicate(b"done\n")


def cleanup(folder: Path) -> subprocess.Popen[bytes]:
    """Start the shell that removes a folder unless it reads `done` before the end of its stdin."""
    return subprocess.Popen(
        ["/bin/sh", "-c", CLEANUP, "sh", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # so that it outlives the terminal or notebook
    )
