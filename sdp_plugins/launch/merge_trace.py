"""Puts the traces of all ranks into one file.

python -m sdp_plugins.launch.merge_trace FOLDER

Writes FOLDER/trace.json, for https://ui.perfetto.dev or chrome://tracing, and prints who was late.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sdp_plugins.core import trace_file
from sdp_plugins.launch.trace_clocks import Offset, align
from sdp_plugins.launch.trace_files import MERGED, Json, RankTrace, read_all, together
from sdp_plugins.launch.trace_summary import summary


def merge(folder: str | Path) -> Path:
    """Merge the traces in a folder; returns the path of the result.

    Raises:
        FileNotFoundError: No rank has left one.
        ValueError: They are of different jobs, or one cannot be read.
    """
    folder = Path(folder)
    path = folder / MERGED
    if path.exists() and trace_file.about(path) is None:
        raise ValueError(f"{path} was written by something else. Hint: move it.")
    whole = merged(read_all(folder))
    return trace_file.write(path, whole["otherData"], whole["traceEvents"])


def described(folder: Path) -> str:
    """Merge the traces in a folder, and say where the result is and who was late, or why not."""
    try:
        path = merge(folder)
    except (OSError, ValueError) as error:
        return f"there is no trace: {error}"
    return f"{path}: open it in https://ui.perfetto.dev\n{summary(json.loads(path.read_text()))}"


def merged(traces: list[RankTrace]) -> Json:
    """All ranks' traces as one, by one clock that begins with the first event."""
    offsets = align(traces)
    for trace in traces:
        trace.shift(offsets[trace.clock].us)
    origin = min((e["ts"] for t in traces for e in t.events if "ts" in e), default=0.0)
    for trace in traces:
        trace.shift(-origin)
    arrows = list(_compare(traces))
    return {
        "traceEvents": [event for trace in traces for event in trace.events] + arrows,
        "displayTimeUnit": "ms",
        "otherData": _about(traces, offsets, origin),
    }


def _about(traces: list[RankTrace], offsets: dict[str, Offset], origin: float) -> dict[str, Any]:
    there = {trace.rank for trace in traces}
    return {
        "world_size": traces[0].world_size,
        "ranks_without_a_trace": sorted(set(range(traces[0].world_size)) - there),
        "began_unix_us": origin + traces[0].wall_minus_monotonic_us,
        "clocks": {clock: asdict(offset) for clock, offset in offsets.items()},
        "dropped": {str(t.rank): t.about["dropped"] for t in traces if t.about["dropped"]},
        "failures": {str(t.rank): t.about["failures"] for t in traces if t.about["failures"]},
    }


def _compare(traces: list[RankTrace]) -> Iterator[Json]:
    """Say in each collective who came last, of all ranks; connect it over the ranks by arrows."""
    for number, operation in enumerate(together(traces), 1):
        operation.sort(key=lambda seen: seen[1]["ts"])
        (_, begun_first), (last, begun_last) = operation[0], operation[-1]
        for _, event in operation:
            if "failed" in event["args"]:
                event["args"]["did not come"] = _absent(operation)
            elif len(operation) > 1:
                event["args"]["last to arrive"] = f"rank {last.rank}"
                event["args"]["late_us"] = round(begun_last["ts"] - begun_first["ts"], 3)
        if len(operation) > 1:
            yield from _arrows(number, operation)


def _absent(operation: list[tuple[RankTrace, Json]]) -> str:
    """Ranks of the group that have not begun this operation, as their traces say."""
    trace, event = operation[0]
    label = event["args"]["group"]
    came = {trace.about["groups"][label][0] for trace, _ in operation}
    missing = sorted(set(range(trace.about["groups"][label][1])) - came)
    return ", ".join(f"rank {rank}" for rank in missing) or "all came"


def _arrows(number: int, operation: list[tuple[RankTrace, Json]]) -> Iterator[Json]:
    for place, (_, event) in enumerate(operation):
        phase = "s" if place == 0 else "f" if place == len(operation) - 1 else "t"
        arrow = {key: event[key] for key in ("name", "ts", "pid", "tid")}
        yield {**arrow, "cat": "same operation", "ph": phase, "id": number, "bp": "e"}


def main(arguments: list[str]) -> int:
    """The command."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    try:
        path = merge(arguments[0])
    except (OSError, ValueError) as error:
        print(f"merge_trace: {error}", file=sys.stderr)
        return 1
    print(summary(json.loads(path.read_text())))
    print(f"\n{path}: open it in https://ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
