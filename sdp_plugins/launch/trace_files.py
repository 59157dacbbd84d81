"""Traces that the ranks of a job have left in a folder."""

from __future__ import annotations

import errno
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdp_plugins.core import trace_file

Json = dict[str, Any]
MERGED = "trace.json"
_OF_A_RANK = re.compile(r"rank-[0-9]{5}\.json")
_NAMES = re.compile(r"rank-[0-9]{5}\.json|trace\.json|\.(rank-[0-9]{5}|trace)\.json\.[0-9]+")
_UNFINISHED = re.compile(r"\..*")  # of a process that was killed while it wrote


@dataclass
class RankTrace:
    """One rank's file; times are microseconds of its node's clock until they are shifted."""

    rank: int
    world_size: int
    clock: str
    wall_minus_monotonic_us: float
    about: Json
    events: list[Json]

    @classmethod
    def read(cls, path: Path) -> RankTrace:
        """Read what ``core.trace`` has written.

        Raises:
            ValueError: It is no such file.
        """
        about = trace_file.about(path)
        if about is None:
            raise ValueError(f"{path} is no trace of a rank. Hint: move it.")
        try:
            return cls(
                about["rank"],
                about["world_size"],
                about["clock"],
                about["wall_minus_monotonic_us"],
                about,
                list(trace_file.events(path)),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no trace of a rank: {error!r}") from None

    def slices(self, cat: str) -> Iterator[Json]:
        """Slices of one category."""
        return (event for event in self.events if event["ph"] == "X" and event["cat"] == cat)

    def shift(self, by_us: float) -> None:
        """Move all events in time."""
        for event in self.events:
            if "ts" in event:
                event["ts"] = round(event["ts"] + by_us, 3)


def end_of(event: Json) -> float:
    """When a slice ends."""
    return float(event["ts"]) + float(event["dur"])


def prepared(folder: Path) -> dict[str, str]:
    """Make the folder for a new job's traces; the variable that tells the ranks of it.

    Raises:
        ValueError: They cannot be written there, or would replace files that are not ours.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        clear(folder)
    except OSError as error:
        why = "it is a file" if folder.is_file() else error.strerror
        raise ValueError(
            f"--trace {folder}: {why}. Hint: give a folder that is there, or can be made."
        ) from None
    return {"SDP_TRACE": str(folder.resolve())}


def clear(folder: Path) -> None:
    """Remove what an earlier job has left, before the ranks of a new one start.

    Raises:
        ValueError: A file that is not ours has a name of ours; nothing is removed then.
    """
    ours = [path for path in folder.iterdir() if _NAMES.fullmatch(path.name)]
    for path in ours:
        if trace_file.about(path) is None and not _UNFINISHED.fullmatch(path.name):
            raise ValueError(
                f"--trace {folder}: {path.name} there was written by something else. Hint: move "
                "it, or give another folder."
            )
    for path in ours:
        if trace_file.about(path) is not None:
            path.unlink()


def read_all(folder: Path) -> list[RankTrace]:
    """The traces of all ranks, by rank.

    Raises:
        FileNotFoundError: There is none.
        ValueError: They are of different jobs, or one cannot be read.
    """
    traces = [RankTrace.read(path) for path in _of_ranks(folder)]
    if not traces:
        raise FileNotFoundError(
            f"no rank has left a trace in {folder}. Hint: all ranks need SDP_TRACE={folder}, and "
            "must end by themselves."
        )
    sizes = {trace.world_size for trace in traces}
    if len(sizes) > 1:
        raise ValueError(
            f"{folder} holds traces of jobs of {' and '.join(map(str, sorted(sizes)))} ranks. "
            "Hint: give each job a folder of its own."
        )
    return traces


def _of_ranks(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _OF_A_RANK.fullmatch(path.name))


def together(traces: Iterable[RankTrace]) -> list[list[tuple[RankTrace, Json]]]:
    """Each collective as the ranks have seen it, in the order of groups and sequence numbers."""
    found: dict[tuple[str, int], list[tuple[RankTrace, Json]]] = defaultdict(list)
    for trace in traces:
        for event in trace.slices("collective"):
            found[event["args"]["group"], event["args"]["seq"]].append((trace, event))
    return [found[key] for key in sorted(found)]
