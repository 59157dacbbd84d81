"""Whole jobs: scripts that start their own ranks, and how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from tests.side_by_side import side_by_side

HERE = Path(__file__).parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE / "lean")}
TIMEOUT_S = 500.0  # of a job that hangs: a busy machine takes a minute to import Lightning
END_S = 150.0  # from a failure to the end of the job, far from the 30 minutes of a time-out
# A script's last words before it fails, and the main process's when it is interrupted.
ANNOUNCED, INTERRUPTED = "failed at ", "Detected KeyboardInterrupt"


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
        announced = re.search(rf"{ANNOUNCED}([\d.]+)", self.output)
        assert announced, f"the failure was not reached:\n{self.output}"
        return self.ended_at - float(announced[1])


class Job:
    """A script of this folder that is run as a user does, in a session of its own.

    Args:
        script: Its name.
        *arguments: What follows on the command line.
        through: What stands before the script on the command line.
        environment: More variables.
        signals: To send to the main process when the script announces its failure. Standard input
            ends when the main process says that it was interrupted.
    """

    def __init__(
        self,
        script: str,
        *arguments: str,
        through: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        signals: int | None = None,
    ) -> None:
        self.command = [sys.executable, *through, str(HERE / "scripts" / script), *arguments]
        self.environment = {**os.environ, **ENVIRONMENT, **(environment or {})}
        self.signals = signals

    def run(self) -> Ended:
        """Start it and wait for its end; fails when that does not come in time."""
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        limit = Timer(TIMEOUT_S, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        with process:
            output = self._follow(process)
        ended_at = time.monotonic()
        assert limit.is_alive(), f"still running after {TIMEOUT_S} s:\n{output}"
        limit.cancel()
        limit.join()
        return Ended(process.returncode, output, ended_at)

    def _follow(self, process: subprocess.Popen[str]) -> str:
        """What the job writes; its standard input and the signal as its lines come."""
        assert process.stdin and process.stdout
        lines = []
        for line in process.stdout:
            lines.append(line)
            if self.signals and line.startswith(ANNOUNCED):
                process.send_signal(self.signals)
            if INTERRUPTED in line:
                process.stdin.close()
        return "".join(lines)


def run_jobs(*jobs: Job) -> list[Ended]:
    """Run two at a time: each of them mostly imports, in one process after the other."""
    return side_by_side(Job.run, [(job,) for job in jobs], at_once=2)
