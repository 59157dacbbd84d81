"""Whole jobs: a script that starts its own ranks, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).with_name("scripts")


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    code: int
    output: str
    ended_at: float

    @property
    def results(self) -> list[str]:
        """What the ranks printed as their results, in rank order."""
        lines = re.findall(r"rank (\d) of (\d): ([-\d.]+)", self.output)
        return [f"{world}: {value}" for _, world, value in sorted(lines)]

    @property
    def seconds_after_failure(self) -> float:
        """Time from the failure that the script announced to the end of the job."""
        announced = re.search(r"failed at ([\d.]+)", self.output)
        assert announced, f"the failure was not reached:\n{self.output}"
        return self.ended_at - float(announced[1])


def run_script(
    script: str,
    *arguments: str,
    through: tuple[str, ...] = (),
    signals: int | None = None,
    timeout_s: float = 60.0,
) -> Ended:
    """Run a script of this folder as a user does, in a session of its own.

    Args:
        script: Its name.
        *arguments: What follows on the command line.
        through: What stands before the script on the command line.
        signals: To send to the main process when the script announces its failure.
        timeout_s: Seconds after which the test fails.
    """
    command = [sys.executable, *through, str(SCRIPTS / script), *arguments]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        begun = send_when_announced(process, signals) if signals else ""
        output, _ = process.communicate(timeout=timeout_s)
        return Ended(process.returncode, begun + output, time.monotonic())
    except subprocess.TimeoutExpired as expired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s:\n{output}") from expired


def send_when_announced(process: subprocess.Popen[str], number: int) -> str:
    """Send the signal once the script has announced a failure; what it has written by then."""
    assert process.stdout is not None
    begun = ""
    for line in process.stdout:
        begun += line
        if line.startswith("failed at"):
            process.send_signal(number)
            break
    return begun
