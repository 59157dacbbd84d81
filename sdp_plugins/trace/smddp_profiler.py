"""SMDDP's profiler: a timeline file per rank, in the format of SageMaker Debugger."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from sdp_plugins.trace.recorder import Write, trace_recorder
from sdp_plugins.trace.trace_file import replacing

SUFFIX = "smdataparallel_timeline.json"


def start_profiler(path: str, append_rank: bool = False) -> None:
    """Record this process's operations, for `stop_profiler` to write.

    If a trace is being recorded already (``SDP_TRACE``), it continues, with a warning.

    Args:
        path: The file. ``_smdataparallel_timeline.json`` is appended unless the path ends with it.
        append_rank: Whether ``_00003`` is inserted before that, so that ranks can pass one path.
    """
    try:
        trace_recorder.start(timeline(path, append_rank))
    except RuntimeError as error:
        warnings.warn(f"start_profiler({path!r}): {error}", stacklevel=2)


def stop_profiler() -> None:
    """Write the timeline, if one is being recorded by `start_profiler`."""
    if not trace_recorder.lasts:
        trace_recorder.stop()


def timeline(path: str, append_rank: bool) -> Write:
    """Write a file with SMDDP's naming."""
    stem = path.removesuffix(SUFFIX).removesuffix("_")

    def write(rank: int, trace: dict[str, Any]) -> Path:
        parts = [stem, *([f"{rank:05d}"] if append_rank else []), SUFFIX]
        join = "" if stem.endswith("/") or not stem else "_"
        path = Path(stem + join + "_".join(parts[1:]))
        with replacing(path) as file:
            file.write(json.dumps(as_debugger_reads(trace)))
        return path

    return write


def as_debugger_reads(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The array form of a trace; its times are relative to the one in its first event."""
    about, events = trace["otherData"], trace["traceEvents"]
    began_us = about["started_us"]
    epoch = {"start_time_since_epoch_in_micros": int(began_us + about["wall_minus_monotonic_us"])}
    relative = [
        event | ({"ts": round(event["ts"] - began_us, 3)} if "ts" in event else {})
        for event in events
    ]
    name = next(event for event in relative if event["name"] == "process_name")
    name["args"] = name["args"] | epoch
    return relative
