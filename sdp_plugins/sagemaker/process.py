"""The processes of a job: started by `smddprun`, their output printed as it comes."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from glob import glob
from pathlib import Path

from sdp_plugins.launch.spawn import child_setup

_LAST_LINES = 100
_END_LIMIT_S = 30.0


def count_gpus() -> int:
    """How many this machine has."""
    return len(glob("/dev/nvidia[0-9]*"))


def run(job: Path, ranks: int, processes: int, quiet: bool) -> tuple[int, str]:
    """Run a job's ranks to their end.

    Args:
        job: The job's folder.
        ranks: How many there are; 0: one process that is no rank.
        processes: How many of them a host has.
        quiet: Whether to print nothing.

    Returns:
        The exit code, and the launcher's last words, which end in the traceback to blame.
    """
    line = [sys.executable, "-m", "sdp_plugins.sagemaker.rank", str(job), str(processes)]
    if ranks:
        launcher = [sys.executable, "-m", "sdp_plugins.launch.smddprun", "-n", str(ranks)]
        line = [*launcher, *line]
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=child_setup(set()),  # should this process be killed, so are they
    ) as process:
        try:
            for text in process.stdout or ():
                last.append(text)
                if not quiet:  # by `print`, or notebooks would not show it
                    print(text, end="", flush=True)
            return process.wait(), _reason(last)
        except BaseException:  # Ctrl-C, in a notebook too: nothing may go on
            process.terminate()
            try:
                process.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def _reason(lines: Iterable[str]) -> str:
    text = "".join(lines).strip()
    return text[max(text.rfind("\nsdp run: "), 0) :].strip()
