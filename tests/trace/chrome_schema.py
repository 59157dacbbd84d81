"""What a trace must be like for Perfetto and chrome://tracing to read it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Json = dict[str, Any]
NEEDED = {
    "X": {"name": str, "cat": str, "ts": (int, float), "dur": (int, float), "args": dict},
    "M": {"name": str, "args": dict},
    "s": {"name": str, "cat": str, "ts": (int, float), "id": int, "bp": str},
    "t": {"name": str, "cat": str, "ts": (int, float), "id": int, "bp": str},
    "f": {"name": str, "cat": str, "ts": (int, float), "id": int, "bp": str},
}


def check(trace: Json) -> None:
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        for key, kind in {"pid": int, "tid": int, **NEEDED[event["ph"]]}.items():
            assert isinstance(event[key], kind), event
        assert event.get("dur", 0) >= 0
    check_nesting(trace["traceEvents"])
    check_names(trace["traceEvents"])


def check_nesting(events: list[Json]) -> None:
    """Slices of a thread lie apart or in each other; others are drawn wrongly."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            end = round(event["ts"] + event["dur"], 3)
            threads[event["pid"], event["tid"]].append((event["ts"], end))
    for slices in threads.values():
        around: list[float] = []
        for begin, end in sorted(slices, key=lambda piece: (piece[0], -piece[1])):
            while around and around[-1] <= begin + 0.002:
                around.pop()
            assert not around or end <= around[-1] + 0.002, (begin, end, around)
            around.append(end)


def check_names(events: list[Json]) -> None:
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    drawn = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert drawn == named
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    assert {pid for pid, _ in drawn} <= processes
