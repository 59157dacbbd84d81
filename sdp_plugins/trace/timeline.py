"""The flight recorder's operations as a Chrome trace: those of ``SDP_TRACE`` tell more."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sdp_plugins.core.flight.sheet import Sheet
from sdp_plugins.core.trace.chrome import Recorded, Seat, draw
from sdp_plugins.core.trace_file import replacing


def write(path: Path, sheets: Sequence[Sheet]) -> None:
    """Write all ranks into one file, for Perfetto.

    Args:
        path: The file.
        sheets: Of one job. Where they are of several machines, these machines' clocks on the wall
            are believed.

    Raises:
        OSError: It cannot be written.
    """
    events = [event for rank in _by_rank(sheets) for event in _events(rank)]
    about = {"job": sheets[0].about.job, "from": "the flight recorder"}
    with replacing(path) as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}, file)


def _by_rank(sheets: Sequence[Sheet]) -> list[list[Sheet]]:
    found: dict[tuple[str, str], list[Sheet]] = {}
    for sheet in sheets:
        found.setdefault((sheet.about.host, sheet.about.process), []).append(sheet)
    return list(found.values())


def _events(rank: Sequence[Sheet]) -> Iterator[dict[str, Any]]:
    largest = max((sheet.about for sheet in rank), key=lambda about: about.world_size)
    shift_us = (rank[0].read_unix_ns - rank[0].read_ns) / 1000
    for event in draw(largest.job_rank, largest.host, [*_recorded(rank)], ()):
        yield event | ({"ts": round(event["ts"] + shift_us, 3)} if "ts" in event else {})


def _recorded(rank: Sequence[Sheet]) -> Iterator[Recorded]:
    labels: dict[str, int] = {}
    for sheet in rank:
        about = sheet.about
        labels[about.name] = number = labels.get(about.name, 0) + 1
        label = about.name if number == 1 else f"{about.name} ({number})"
        seat = Seat(about.name, about.rank, about.world_size, about.members, about.pid)
        events = [*sheet.operations, *sheet.messages, *sheet.steps]
        yield Recorded(seat, number, label, events, 0, sheet.cause, sheet.read_ns)
