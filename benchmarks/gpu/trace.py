"""What a profile of torch's says: how much of the communication computation hides."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Interval = tuple[float, float]
DOWN, UP = "Memcpy DtoH", "Memcpy HtoD"


def hidden_share(path: Path) -> dict[str, float]:
    """Return the microseconds of communication in a trace, and the share of them that is hidden.

    A reduction begins as its first byte leaves the device, and ends as its last byte is back. It is
    hidden while a kernel runs, which Holistic Trace Analysis calls communication computation
    overlap.

    Args:
        path: A Chrome trace of training steps, in which nothing but gradients leaves the device.

    Returns:
        `communication_us` and `hidden`; nothing if the trace has no copies.
    """
    return share_of(json.loads(path.read_text())["traceEvents"])


def share_of(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Do the same for a trace's events."""
    changes: list[tuple[float, int]] = []  # when how many bytes leave, or are back
    kernels: list[Interval] = []
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        if kind == "kernel":
            kernels.append((event["ts"], event["ts"] + event["dur"]))
        elif kind == "gpu_memcpy" and name.startswith(DOWN):
            changes.append((event["ts"], event["args"]["bytes"]))
        elif kind == "gpu_memcpy" and name.startswith(UP):
            changes.append((event["ts"] + event["dur"], -event["args"]["bytes"]))
    communication = _while_away(changes)
    total = sum(end - begin for begin, end in communication)
    if not total:
        return {}
    return {"communication_us": total, "hidden": _common(communication, _union(kernels)) / total}


def _while_away(changes: list[tuple[float, int]]) -> list[Interval]:
    """Return the times in which bytes are away."""
    found: list[Interval] = []
    away, begin = 0, 0.0
    for when, nbytes in sorted(changes):
        if away <= 0 < away + nbytes:
            begin = when
        elif away + nbytes <= 0 < away:
            found.append((begin, when))
        away += nbytes
    return found


def _union(intervals: list[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _common(first: list[Interval], second: list[Interval]) -> float:
    """Return the length that two lists of separate intervals in order have in common."""
    total, at = 0.0, 0
    for begin, end in first:
        while at < len(second) and second[at][1] <= begin:
            at += 1
        index = at
        while index < len(second) and second[index][0] < end:
            total += min(end, second[index][1]) - max(begin, second[index][0])
            index += 1
    return total
