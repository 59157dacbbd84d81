"""Reports of the flight recorder as files; those of several ranks, or nodes, are read together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import trace_file
from .sheet import Sheet, latest

FORMAT = "sdp_plugins flight 1"
SUFFIX = ".flight.json"
_MOST_BYTES = 2**30


def text_of(sheets: Sequence[Sheet]) -> str:
    """The file."""
    return json.dumps({"format": FORMAT, "ranks": [sheet.to_json() for sheet in sheets]})


def write(folder: str | Path, job_rank: int, sheets: Sequence[Sheet]) -> Path:
    """Write a rank's report: ``rank-00003.1a2b3c4d.flight.json``, the word being the job's.

    Args:
        folder: Where; it is made.
        job_rank: Whose it is.
        sheets: What it sees of its node; not empty.

    Raises:
        OSError: It cannot be written.
    """
    job = {"job": sheets[0].about.job, "world_size": max(s.about.world_size for s in sheets)}
    path = Path(folder) / f"rank-{job_rank:05d}.{trace_file.job_token(job)}{SUFFIX}"
    with trace_file.replacing(path) as file:
        file.write(text_of(sheets))
    return path


def read(paths: Sequence[Path]) -> list[Sheet]:
    """What several reports say together; of a folder all that are in it.

    Raises:
        OSError: One cannot be read.
        ValueError: One is something else.
    """
    return latest(sheet for path in _files(paths) for sheet in _read(path))


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"there is no report of the flight recorder in {path}")
        files += found
    return files


def _read(path: Path) -> list[Sheet]:
    try:
        found = _json_of(path.read_text())
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError("it is no report of the flight recorder")
        return [Sheet.from_json(sheet) for sheet in found.get("ranks", ())]
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def _json_of(text: str) -> Any:
    """What a text says; None if it is no JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None
