"""Whether processes that a test has started still run, and a wait for their end."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

from tests.ranks import HANG_S


def runs(process: int | psutil.Process) -> bool:
    """Whether a process, given by its id or as it was found, has not ended."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(processes: Iterable[int | psutil.Process]) -> None:
    """Return when all have ended."""
    end = time.monotonic() + HANG_S
    left = list(processes)
    while left := [process for process in left if runs(process)]:
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.01)
