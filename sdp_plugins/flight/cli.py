"""The command `sdp flight`: which ranks of a job wait for which others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sdp_plugins.flight import closed_pipe, report_file, timeline
from sdp_plugins.flight.choice import NoSuchJobError, job_here, only_job
from sdp_plugins.flight.jobs import Job, find_jobs
from sdp_plugins.flight.table import table
from sdp_plugins.flight.wait_report import report


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="sdp flight",
        description="Shows which ranks of a job wait for which others, and in which operation. "
        "Reads the ranks that run on this machine, or report files: failed jobs leave them in "
        "SDP_FLIGHT_DIR, and --json writes them on other machines.",
    )
    made.add_argument(
        "job",
        nargs="*",
        metavar="JOB | FILE",
        help="key of a job or part of it; pid of a rank or of its launcher; report files, or "
        "folders of report files. Default: the only job on this machine",
    )
    made.add_argument(
        "--last", type=int, default=0, metavar="N", help="also list each rank's last N operations"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write a report file")
    made.add_argument(
        "--chrome",
        type=Path,
        metavar="FILE",
        help="write a timeline for https://ui.perfetto.dev",
    )
    return made


def main(arguments: Sequence[str]) -> int:
    """The command."""
    options = parser().parse_args(arguments)
    try:
        found = _chosen(options.job)
        _write(found, options)
        print("\n".join(_text(found, options.last)), flush=True)
    except BrokenPipeError:
        return closed_pipe.exit_code()
    except (NoSuchJobError, OSError, ValueError) as error:
        print(f"flight: {error}", file=sys.stderr)
        return 1
    return 0


def _text(job: Job, last: int) -> list[str]:
    return [job.title, *report(job.snapshots), *(table(job.snapshots, last) if last > 0 else [])]


def _write(job: Job, options: argparse.Namespace) -> None:
    if options.json:
        options.json.write_text(report_file.text_of(job.snapshots))
    if options.chrome:
        timeline.write(options.chrome, job.snapshots)


def _chosen(words: Sequence[str]) -> Job:
    paths = [Path(word) for word in words]
    if words and all(path.exists() for path in paths):
        return only_job(find_jobs(report_file.read(paths)), "in these reports")
    if len(words) > 1:
        missing = next(word for word, path in zip(words, paths, strict=True) if not path.exists())
        raise NoSuchJobError(f"there is no file {missing}. Hint: name one job, or report files.")
    if words and "/" in words[0]:
        raise NoSuchJobError(f"there is no file {words[0]}.")
    return job_here(words[0] if words else "")
