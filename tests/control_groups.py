"""Real control groups of version 1, such as those of a container with limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def control_group(controller: str, **files: str) -> Iterator[Path]:
    """A control group of version 1; the test is skipped where none can be made."""
    folder = CGROUPS / controller / f"sdp-test-{os.getpid()}"
    try:
        folder.mkdir()
        for name, value in files.items():
            (folder / f"{controller}.{name}").write_text(value)
    except OSError:
        pytest.skip(f"no limit of {controller} can be set here")
    try:
        yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()


def entering(folder: Path) -> None:
    """Put this process, and all that it starts, into a control group."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))
