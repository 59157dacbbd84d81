"""A timeline of this process's operations, for Perfetto and chrome://tracing.

    trace.start("/tmp/trace")        # or SDP_TRACE=/tmp/trace in the environment of all ranks
    with trace.span("step"):         # a part of the program, drawn beside its operations
        ...
    trace.stop()                     # writes /tmp/trace/rank-00003.json

``python -m sdp_plugins.trace merge /tmp/trace`` merges the files of all ranks. See docs/trace.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sdp_plugins.trace.recorder import in_folder, trace_recorder

__all__ = ["add_span", "span", "start", "stop"]


def start(folder: str | os.PathLike[str]) -> None:
    """Record the operations of all groups of this process, including later ones.

    Args:
        folder: Folder in which ``rank-00003.json`` will be written, or ``rank-00003.1a2b3c4d.json``
            if it has that file of another job.

    Raises:
        RuntimeError: A trace is being recorded already.
    """
    trace_recorder.start(in_folder(folder))


def stop() -> Path | None:
    """Write the trace; returns its path, or None if no trace was being recorded.

    Raises:
        OSError: The trace cannot be written.
    """
    return trace_recorder.stop()


@contextmanager
def span(name: str) -> Iterator[None]:
    """Draw the duration of the block as a slice of its thread's lane."""
    begin_ns = time.monotonic_ns()
    try:
        yield
    finally:
        trace_recorder.add_span(name, begin_ns, time.monotonic_ns())


def add_span(name: str, begin_ns: int, end_ns: int) -> None:
    """Draw a span of the program between two times of ``time.monotonic_ns()``."""
    trace_recorder.add_span(name, begin_ns, end_ns)
