"""Finds the steps of a training in what a rank has called."""

from __future__ import annotations

from collections.abc import Sequence

from sdp_plugins.core.trace_event import FAILED, TraceEvent

_TIMES = 3


def operations_per_step(events: Sequence[TraceEvent]) -> int | None:
    """The length of the shortest sequence of different collectives that repeats; None if none does.

    It must repeat three times, and throughout the last half of the events: a step that begins with
    ten equal operations is longer than one operation. If all are equal, nobody knows how many of
    them are a step.

    Args:
        events: The last collectives of a rank, in their order.
    """
    done = [event for event in events if event.finished and not event.flags & FAILED]
    calls = [(event.op, event.dtype, event.elems, event.reduce_op, event.layout) for event in done]
    for length in range(1, len(calls) // _TIMES + 1):
        covered = max(_TIMES * length, len(calls) // 2)
        if calls[-covered:-length] == calls[length - covered :]:
            return length if length > 1 else None
    return None
