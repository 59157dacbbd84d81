"""Traces that the ranks of a job have left in a folder."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]
MERGED = "trace.json"


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
        try:
            whole = json.loads(path.read_text())
            about = whole["otherData"]
            return cls(
                about["rank"],
                about["world_size"],
                about["clock"],
                about["wall_minus_monotonic_us"],
                about,
                whole["traceEvents"],
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
    """Make the folder for a new job's traces; the variable that tells the ranks of it."""
    folder.mkdir(parents=True, exist_ok=True)
    clear(folder)
    return {"SDP_TRACE": str(folder.resolve())}


def clear(folder: Path) -> None:
    """Remove what an earlier job has left, before the ranks of a new one start."""
    for path in (*folder.glob("rank-*.json"), *folder.glob(MERGED)):
        path.unlink()


def read_all(folder: Path) -> list[RankTrace]:
    """The traces of all ranks, by rank.

    Raises:
        FileNotFoundError: There is none.
        ValueError: They are of different jobs, or one cannot be read.
    """
    traces = [RankTrace.read(path) for path in sorted(folder.glob("rank-*.json"))]
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


def together(traces: Iterable[RankTrace]) -> list[list[tuple[RankTrace, Json]]]:
    """Each collective as the ranks have seen it, in the order of groups and sequence numbers."""
    found: dict[tuple[str, int], list[tuple[RankTrace, Json]]] = defaultdict(list)
    for trace in traces:
        for event in trace.slices("collective"):
            found[event["args"]["group"], event["args"]["seq"]].append((trace, event))
    return [found[key] for key in sorted(found)]
