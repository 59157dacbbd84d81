"""A timeline of this process's operations, for Perfetto and chrome://tracing.

    trace.start("/tmp/trace")        # or SDP_TRACE=/tmp/trace in the environment of all ranks
    with trace.span("step"):         # what the program does, drawn beside its operations
        ...
    trace.stop()                     # writes /tmp/trace/rank-00003.json

``python -m sdp_plugins.launch.merge_trace /tmp/trace`` puts all ranks into one file. See
docs/trace.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .recording import in_folder, recorder

__all__ = ["add_span", "span", "start", "stop"]


def start(folder: str | os.PathLike[str]) -> None:
    """Record the operations of all of this process's groups, those made later included.

    Args:
        folder: Where ``rank-00003.json`` will be written, or ``rank-00003.1a2b3c4d.json`` beside
            one of another job, which is kept.

    Raises:
        RuntimeError: A trace is being recorded.
    """
    recorder.start(in_folder(folder))


def stop() -> Path | None:
    """Write the trace; returns its path, or None if nothing was recorded.

    Raises:
        OSError: It cannot be written.
    """
    return recorder.stop()


@contextmanager
def span(name: str) -> Iterator[None]:
    """Draw what the block does as a slice of its thread's lane."""
    begin_ns = time.monotonic_ns()
    try:
        yield
    finally:
        recorder.add_span(name, begin_ns, time.monotonic_ns())


def add_span(name: str, begin_ns: int, end_ns: int) -> None:
    """Draw what has been between two times of ``time.monotonic_ns()``."""
    recorder.add_span(name, begin_ns, end_ns)
