"""The file of a trace: it begins with the format's name, and each event has its own line.

So a launcher can recognize it without reading it, and the merge needs no whole file in memory. The
file is valid JSON for Perfetto and chrome://tracing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

Json = dict[str, Any]
FORMAT = "sdp_plugins trace 1"
_BEGIN = json.dumps({"otherData": {"format": FORMAT}})[: -len("}}")]
_END = "]}"


def write(path: Path, about: Json, events: Iterable[Json]) -> Path:
    """Write a trace; `about` begins with another ``format`` if it is not of this recorder."""
    head = {"otherData": {"format": FORMAT} | about, "displayTimeUnit": "ms"}
    with replacing(path) as file:
        file.write(json.dumps(head)[: -len("}")] + ', "traceEvents": [')
        comma = "\n"
        for event in events:
            file.write(comma + json.dumps(event))
            comma = ",\n"
        file.write(f"\n{_END}\n")
    return path


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Write a file that appears only when it is complete; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w") as file:
            yield file
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def about(path: Path) -> Json | None:
    """``otherData`` of a trace; None if the file is not a trace or cannot be read."""
    try:
        if not path.is_file():  # a FIFO would block
            return None
        with path.open() as file:
            if file.read(len(_BEGIN)) != _BEGIN:
                return None
            file.seek(0)
            found = json.loads(file.readline() + _END)["otherData"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def job_token(about: Json) -> str:
    """A short name for the job of a trace."""
    job = f"{about['job']} {about['world_size']}"
    return hashlib.sha256(job.encode()).hexdigest()[:8]


def events(path: Path) -> Iterator[Json]:
    """The events of a trace, one after the other.

    Raises:
        ValueError: The file is truncated or was changed.
    """
    with path.open() as file:
        file.readline()
        for line in file:
            if line.startswith(_END):
                return
            yield json.loads(line.rstrip(",\n"))
    raise ValueError("the file is truncated")
