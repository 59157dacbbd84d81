"""Whole jobs, started as users do."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks import HANG_S

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@dataclass(frozen=True)
class Result:
    """What a rank printed of one way."""

    way: str
    rank: int
    world: int
    found: list[str]
    losses: list[float]
    digest: str


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    code: int
    output: str

    def results(self) -> dict[str, list[Result]]:
        """Of each way, in rank order."""
        texts = re.findall(r"result (\[.*?\"\w{16}\"\])", self.output)
        found = [Result(*json.loads(text)) for text in texts]
        ways = dict.fromkeys(result.way for result in found)
        return {
            way: sorted((r for r in found if r.way == way), key=lambda r: r.rank) for way in ways
        }


def run(*command: str, environment: Mapping[str, str] | None = None) -> Ended:
    """Run `python COMMAND` in a session of its own; fails when it does not end in time."""
    given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths(ROOT), **(environment or {})}
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **given},
        start_new_session=True,
    )
    with process:
        try:
            output, _ = process.communicate(timeout=HANG_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return Ended(process.returncode, output)


def paths(first: Path) -> str:
    """PYTHONPATH with one more."""
    return os.pathsep.join(filter(None, [str(first), os.environ.get("PYTHONPATH", "")]))


def ways(launcher: list[str], *names: str, **others: Any) -> Ended:
    """Run the script of ways under a launcher."""
    return run(*launcher, str(HERE / "scripts" / "ways.py"), *names, **others)
