"""The processes of a job: started by `smddprun`, their output printed as it comes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from sdp_plugins.launch.spawn import child_setup, own_program
from sdp_plugins.sagemaker.inherited_env import without_other_jobs

_LAST_LINES = 100
_REPORT = "smddprun: "  # how the launcher's own lines begin, which end the output of a failed job


def run(
    job: Path, ranks: int, processes: int, quiet: bool, read: Callable[[str], None]
) -> tuple[int, str]:
    """Run a job's ranks to their end.

    Ctrl-C interrupts the ranks, which may save what they have; the second one kills them.

    Args:
        job: The job's folder.
        ranks: How many there are.
        processes: How many of them a host has; 0: the only one is to know of no ranks.
        quiet: Whether to print nothing.
        read: Is told each line of their output, but not what the launcher repeats of it.

    Returns:
        The exit code, and the launcher's last words, which end in the traceback to blame.
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
        start_new_session=True,  # or a terminal's Ctrl-C would reach it beside ours
        preexec_fn=child_setup(set()),  # should this process be killed, so are they
    ) as process:
        try:
            _pass_on(process, last, quiet, read)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            _pass_on(process, last, quiet, read)
            raise
        finally:
            process.kill()  # its ranks die with it
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
        if not quiet:  # by `print`, or notebooks would not show it
            print(text, end="", flush=True)
    process.wait()


def _reason(lines: Iterable[str]) -> str:
    text = "".join(lines).strip()
    return text[max(text.rfind(f"\n{_REPORT}"), 0) :].strip() or "it has said nothing"
