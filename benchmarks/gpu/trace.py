"""What a profile of torch's says: how much of the communication computation hides."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
    changes: list[tuple[float, int, int]] = []  # when; so many more bytes are away, and kernels run
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        if kind == "kernel":
            changes += [(event["ts"], 0, 1), (event["ts"] + event["dur"], 0, -1)]
        elif kind == "gpu_memcpy" and name.startswith(DOWN):
            changes.append((event["ts"], event["args"]["bytes"], 0))
        elif kind == "gpu_memcpy" and name.startswith(UP):
            changes.append((event["ts"] + event["dur"], -event["args"]["bytes"], 0))
    total = hidden = last = 0.0
    away = running = 0
    for when, nbytes, kernels in sorted(changes):
        if away > 0:
            total += when - last
            hidden += when - last if running else 0.0
        away, running, last = away + nbytes, running + kernels, when
    return {"communication_us": total, "hidden": hidden / total} if total else {}
