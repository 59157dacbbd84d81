"""What other programs answer."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def answer_of(
    line: Sequence[str | Path],
    environment: Mapping[str, str],
    limit_s: float,
    cwd: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program, which reads nothing, to its end, whatever its exit code is.

    Args:
        line: Its command line.
        environment: All of its variables.
        limit_s: How long it may take.
        cwd: The folder in which it runs; None: the current one.

    Raises:
        OSError: It cannot be started.
        subprocess.TimeoutExpired: It takes too long; it is killed.
    """
    return subprocess.run(
        line,
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit_s,
        check=False,
    )
