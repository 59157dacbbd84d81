"""Runs the processes of a job by `smddprun`, and prints their output as it arrives."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from sdp_plugins.launch.spawn import child_setup, own_program
from sdp_plugins.sagemaker.rank import without_other_jobs

_LAST_LINES = 100
_REPORT = "smddprun: "  # begins the launcher's own lines, the last ones of a failed job


def run(
    job: Path, ranks: int, processes: int, quiet: bool, read: Callable[[str], None]
) -> tuple[int, str]:
    """Run a job's ranks to their end.

    Ctrl-C interrupts the ranks, which may save their state; the second Ctrl-C kills them.

    Args:
        job: The job's folder.
        ranks: Number of ranks.
        processes: Ranks per host; 0: a single process that is not a rank.
        quiet: Whether to print nothing.
        read: Called with each line of their output, without the launcher's report.

    Returns:
        The exit code, and the launcher's report, which ends with the traceback to blame.
    """
    launcher = [*own_program("sdp_plugins.launch.smddprun:smddprun"), "-n", str(ranks)]
    rank = [*own_program("sdp_plugins.sagemaker.rank:main"), str(job), str(processes)]
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with subprocess.Popen(
        [*launcher, *rank],
        env=without_other_jobs(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # or it would receive a terminal's Ctrl-C twice
        preexec_fn=child_setup(set()),  # ends with this process
    ) as process:
        try:
            _pass_on(process, last, quiet, read)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            _pass_on(process, last, quiet, read)
            raise
        finally:
            process.kill()  # its ranks end with it
        return process.returncode, _reason(last)


def _pass_on(
    process: subprocess.Popen[str], last: deque[str], quiet: bool, read: Callable[[str], None]
) -> None:
    reported = False
    for text in process.stdout or ():
        last.append(text)
        reported = reported or text.startswith(_REPORT)
        if not reported:
            read(text)
        if not quiet:  # by `print`, for notebooks
            print(text, end="", flush=True)
    process.wait()


def _reason(lines: Iterable[str]) -> str:
    text = "".join(lines).strip()
    return text[max(text.rfind(f"\n{_REPORT}"), 0) :].strip() or "no output"
