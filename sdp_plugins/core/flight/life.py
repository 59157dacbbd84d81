"""What became of the process of a rank."""

from __future__ import annotations

from ..process_identity import process_state
from .about import About, clock_here, pid_namespace


def life(about: About) -> str:
    """``running``, ``stopped`` (by a signal or a debugger), ``ended``, or ``unknown``."""
    if about.clock != clock_here() or about.pids != pid_namespace():
        return "unknown"
    state = process_state(about.process)
    if not state:
        return "ended"
    return "stopped" if state in "Tt" else "running"
