"""The folder to which the ranks of a job write their traces."""

from __future__ import annotations

import errno
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from sdp_plugins.core.process_identity import clock_id, process_identity
from sdp_plugins.trace import trace_file
from sdp_plugins.trace.trace_file import Json

MERGED = "trace.json"
_RANKS = r"rank-[0-9]{5}(\.[0-9a-f]{8}(-[0-9]+)?)?\.json"
_OF_A_RANK = re.compile(_RANKS)
_NAMES = re.compile(rf"({_RANKS}|trace\.json)|\.({_RANKS}|trace\.json)\.[0-9]+")
_UNFINISHED = re.compile(r"\..*")  # of a process that was killed while writing


def prepared(folder: Path) -> dict[str, str]:
    """Make the folder for a new job's traces; returns the variable that tells the ranks its path.

    Raises:
        ValueError: Traces cannot be written there, or would replace other files.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        clear(folder)
    except OSError as error:
        why = "it is a file" if folder.is_file() else error.strerror
        raise ValueError(
            f"--trace {folder}: {why}. Hint: give a folder that exists or can be made."
        ) from None
    return {"SDP_TRACE": str(folder.resolve())}


def clear(folder: Path) -> None:
    """Remove the traces of earlier jobs, before the ranks of a new one start.

    Raises:
        ValueError: Another program's file has the name of a trace; nothing is removed.
    """
    named = [path for path in folder.iterdir() if _NAMES.fullmatch(path.name)]
    ours = {path for path in named if trace_file.about(path) is not None}
    for path in named:
        if path not in ours and not _UNFINISHED.fullmatch(path.name):
            raise ValueError(
                f"--trace {folder}: {path.name} there was written by something else. Hint: move "
                "the file, or give another folder."
            )
    for path in ours:
        path.unlink()


def free_path(folder: Path, about: Json) -> Path:
    """The path of a rank's trace: ``rank-00003.json``, unless that file must be kept.

    A process that a rank starts inherits SDP_TRACE, and often RANK; it must not replace the rank's
    trace. A file is replaced if this process wrote it, or an ended process of the same job and rank
    (a job that was restarted).
    """
    stem, token = f"rank-{about['rank']:05d}", trace_file.job_token(about)
    pid = about["process"].partition("@")[0]
    for name in (f"{stem}.json", f"{stem}.{token}.json"):
        if _may_be_written(folder / name, about):
            return folder / name
    return folder / f"{stem}.{token}-{pid}.json"


def _may_be_written(path: Path, about: Json) -> bool:
    if not path.exists():
        return True
    there = trace_file.about(path) or {}
    writer = there.get("clock"), there.get("process")
    if writer == (about["clock"], about["process"]):
        return True
    same = all(there.get(key) == about[key] for key in ("job", "world_size", "rank"))
    return same and not _lives(*writer)


def _lives(where: Any, process: Any) -> bool:
    """Whether a process may still run; True for processes of other machines."""
    pid = str(process).partition("@")[0]
    if where != clock_id():
        return True
    return pid.isdigit() and process_identity(int(pid)) == process


Found = tuple[Path, Json]
"""A rank's file, and its ``otherData``."""


def of_job(folder: Path, job: str) -> tuple[list[Found], list[Path]]:
    """The files of one job (named as for `merge`), one per rank, by rank; and those left out.

    Raises:
        FileNotFoundError: There are no files.
        ValueError: The job is ambiguous, or a file is not a trace.
    """
    jobs = _jobs(folder)
    if not jobs:
        raise FileNotFoundError(
            f"no rank has left a trace in {folder}. Hint: only groups of smddp are traced, not "
            f"those of gloo; all ranks need SDP_TRACE={folder} (sdp run --trace sets it) and must "
            "end by themselves (SDP_TIMEOUT_S must be shorter than --timeout)."
        )
    fitting = [found for found in jobs.values() if not job or _is_of(found[0][1], job)]
    if len(fitting) != 1 and not (fitting and job):
        raise ValueError(_which(folder, jobs, job))
    # A process that a rank has started may have the job's id, but is not a rank of the job.
    ranks: dict[int, Found] = {}
    for path, about in max(fitting, key=lambda found: found[0][1]["world_size"]):
        ranks.setdefault(about["rank"], (path, about))
    kept = {path for path, _ in ranks.values()}
    left = [path for found in jobs.values() for path, _ in found if path not in kept]
    return [ranks[rank] for rank in sorted(ranks)], left


def _jobs(folder: Path) -> dict[str, list[Found]]:
    """The files of each job; if a rank has two, that of the first process is first."""
    jobs: dict[str, list[Found]] = defaultdict(list)
    names = [path.name for path in folder.iterdir() if _OF_A_RANK.fullmatch(path.name)]
    for name in sorted(names, key=lambda name: (len(name), name)):
        about = trace_file.about(folder / name)
        if about is None or not {"job", "rank", "world_size"} <= about.keys():
            raise ValueError(f"{folder / name} is not the trace of a rank. Hint: move it.")
        jobs[trace_file.job_token(about)].append((folder / name, about))
    return jobs


def _is_of(about: Json, job: str) -> bool:
    return job in (trace_file.job_token(about), about["job"].removeprefix("id:"))


def _which(folder: Path, jobs: dict[str, list[Found]], job: str) -> str:
    """The error that lists the jobs in a folder."""
    sizes = {word: found[0][1]["world_size"] for word, found in jobs.items()}
    said = [f"{word} ({size} rank{'s' * (size > 1)})" for word, size in sizes.items()]
    what = f"no traces of job {job}, but of" if job else "traces of several jobs:"
    return (
        f"{folder} holds {what} {', '.join(said)}. Hint: name one, as in python -m "
        f"sdp_plugins.trace merge {folder} {next(iter(jobs))}."
    )
