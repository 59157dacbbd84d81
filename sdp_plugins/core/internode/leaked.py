"""Keeps memory that a network may still use after a failure."""

from __future__ import annotations

from .operation import SpanningOperation

_leaked: list[object] = []


def leak(*memory: object) -> None:
    """Keep memory until the process ends.

    Any later call of MPI in this process may write into the memory of a receive that could not be
    cancelled, or read that of a send. MPI does not report when it is done with this memory. New
    data at the same address would be overwritten or sent.
    """
    _leaked.extend(memory)


def abandon(operation: SpanningOperation, *memory: object) -> bool:
    """Give up a failed operation's messages; never raises.

    Args:
        operation: The operation.
        memory: Objects to keep if some messages are still in flight.

    Returns:
        Whether messages are still in flight.
    """
    try:
        left = operation.abandon()
    except BaseException:  # whether messages are in flight is unknown
        left = True
    if left:
        leak(*memory)
    return left
