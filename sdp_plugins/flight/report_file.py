"""Report files of the flight recorder. Those of several ranks or nodes are read together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sdp_plugins.flight.rank_snapshot import RankSnapshot, latest
from sdp_plugins.trace import trace_file

FORMAT = "sdp_plugins flight 3"
SUFFIX = ".flight.json"


def text_of(snapshots: Sequence[RankSnapshot]) -> str:
    """The content of a file."""
    return json.dumps({"format": FORMAT, "ranks": [snapshot.to_json() for snapshot in snapshots]})


def write(folder: str | Path, global_rank: int, snapshots: Sequence[RankSnapshot]) -> Path:
    """Write a rank's report, such as ``rank-00003.1a2b3c4d.flight.json``; the word is the job's.

    Args:
        folder: The folder, which is made.
        global_rank: The rank.
        snapshots: What the rank sees of its node; not empty.

    Raises:
        OSError: It cannot be written.
    """
    job = {"job": snapshots[0].info.job, "world_size": max(s.info.world_size for s in snapshots)}
    path = Path(folder) / f"rank-{global_rank:05d}.{trace_file.job_token(job)}{SUFFIX}"
    with trace_file.replacing(path) as file:
        file.write(text_of(snapshots))
    return path


def read(paths: Sequence[Path]) -> list[RankSnapshot]:
    """Read several files, and all files in folders.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is no report.
    """
    return latest(snapshot for path in _files(paths) for snapshot in _read(path))


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"there is no report of the flight recorder in {path}")
        files += found
    return files


def _read(path: Path) -> list[RankSnapshot]:
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        return [RankSnapshot.from_json(snapshot) for snapshot in found["ranks"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path}: it is not a report of the flight recorder") from error
