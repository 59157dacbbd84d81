"""The name of a rank's trace file: other jobs and other processes may write to the same folder.

A process that a rank starts inherits SDP_TRACE, and often RANK. It must not replace the rank's
trace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdp_plugins.core.process_identity import clock_id, process_identity
from sdp_plugins.trace import trace_file


def free_path(folder: Path, about: dict[str, Any]) -> Path:
    """The path of a rank's trace: ``rank-00003.json``, unless that file must be kept.

    A file is replaced if this process wrote it, or an ended process of the same job and rank (a job
    that was restarted).
    """
    stem, token = f"rank-{about['rank']:05d}", trace_file.job_token(about)
    pid = about["process"].partition("@")[0]
    for name in (f"{stem}.json", f"{stem}.{token}.json"):
        if _may_be_written(folder / name, about):
            return folder / name
    return folder / f"{stem}.{token}-{pid}.json"


def _may_be_written(path: Path, about: dict[str, Any]) -> bool:
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
