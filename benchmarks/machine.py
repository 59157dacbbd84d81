"""The description of the machine in a report."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from sdp_plugins.doctor.report import cpu_model


def describe() -> dict[str, Any]:
    """Return CPU, usable cores, kernel, Python, and the machine's load."""
    return {
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def busy() -> str:
    """Return a remark if other load makes the times unreliable, else an empty string."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load <= cores / 2:
        return ""
    return f"this machine is busy (load {load:.1f} on {cores} cores); repeat this when it is not"
