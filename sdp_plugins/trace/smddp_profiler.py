"""SMDDP's profiler: a timeline file of one rank, as SageMaker Debugger reads it."""

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

    Where a trace is being recorded already (``SDP_TRACE``), that one goes on, with a warning.

    Args:
        path: The file. ``_smdataparallel_timeline.json`` is added unless it ends so.
        append_rank: Whether ``_00003`` is put before that, so that ranks can give the same path.
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
    """Write a file of SMDDP's name."""
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
    """The array form of a trace, whose times count from one that its first event names."""
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
