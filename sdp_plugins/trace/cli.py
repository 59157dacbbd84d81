"""Who waits for whom in a job: `python -m sdp_plugins.trace [job]`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from sdp_plugins.core.flight import report_file
from sdp_plugins.core.flight.jobs import Job, jobs, meant
from sdp_plugins.core.flight.report import report
from sdp_plugins.core.flight.segments import look
from sdp_plugins.trace import timeline
from sdp_plugins.trace.table import table


class UnclearError(Exception):
    """It cannot be shown; the text says why."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m sdp_plugins.trace",
        description="Shows who waits for whom in what, of jobs that run on this machine, or of "
        "reports that failed ones have left (SDP_FLIGHT_DIR) or other machines have written.",
    )
    made.add_argument(
        "job",
        nargs="*",
        metavar="JOB | FILE",
        help="a job's key or a part of it, the pid of a rank or of its launcher; or reports, or "
        "folders of them. Nothing: the only job here",
    )
    made.add_argument(
        "--last", type=int, default=0, metavar="N", help="each rank's last N operations, too"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write a report to be read later")
    made.add_argument(
        "--chrome", type=Path, metavar="FILE", help="write a timeline for https://ui.perfetto.dev"
    )
    return made


def main(arguments: Sequence[str]) -> int:
    """The command."""
    options = parser().parse_args(arguments)
    try:
        found = _chosen(options.job)
        _write(found, options)
        print("\n".join(_text(found, options.last)), flush=True)
    except BrokenPipeError:  # whoever read it has left; nor may Python flush at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (UnclearError, OSError, ValueError) as error:
        print(f"trace: {error}", file=sys.stderr)
        return 1
    return 0


def _text(job: Job, last: int) -> list[str]:
    return [job.title, *report(job.sheets), *(table(job.sheets, last) if last > 0 else [])]


def _write(job: Job, options: argparse.Namespace) -> None:
    if options.json:
        options.json.write_text(report_file.text_of(job.sheets))
    if options.chrome:
        timeline.write(options.chrome, job.sheets)


def _chosen(words: Sequence[str]) -> Job:
    paths = [Path(word) for word in words]
    if words and all(path.exists() for path in paths):
        return _only(jobs(report_file.read(paths)), "in these reports")
    if len(words) > 1:
        missing = next(word for word, path in zip(words, paths, strict=True) if not path.exists())
        raise UnclearError(f"there is no file {missing}. Hint: name one job, or reports.")
    if words and "/" in words[0]:
        raise UnclearError(f"there is no file {words[0]}.")
    found = look()
    here = jobs(found.sheets)
    if not here:
        raise UnclearError(_nothing(found.others))
    return _only(meant(here, words[0]) if words else here, "here", here)


def _only(found: Sequence[Job], where: str, all_jobs: Sequence[Job] = ()) -> Job:
    if len(found) == 1:
        return found[0]
    listed = "\n".join(f"  {job.title}" for job in found or all_jobs)
    if not found:
        raise UnclearError(f"no such job; there are\n{listed}")
    raise UnclearError(f"there are {len(found)} jobs {where}; name one of\n{listed}")


def _nothing(others: int) -> str:
    if others:
        return "the jobs here are of another version of sdp_plugins. Hint: use that one's Python."
    return (
        "no job of this user has an open group on this machine. Hint: ask on the machine, and in "
        "the container, of the ranks, as the user who started them."
    )
