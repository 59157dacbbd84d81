"""Keeps memory that a network may still use after a failure."""

from __future__ import annotations

from collections.abc import Callable

_leaked: list[object] = []


def leak(*memory: object) -> None:
    """Keep memory until the process ends.

    Any later call of MPI in this process may write into the memory of a receive that could not be
    cancelled, or read that of a send. MPI does not report when it is done with this memory. New
    data at the same address would be overwritten or sent.
    """
    _leaked.extend(memory)


def abandon(give_up: Callable[[], bool], *memory: object) -> bool:
    """Give up the messages of a failed operation; never raises.

    Args:
        give_up: Gives them up; returns whether some are still in flight.
        memory: Objects to keep in that case.

    Returns:
        Whether messages are still in flight.
    """
    try:
        left = give_up()
    except BaseException:  # whether messages are in flight is unknown
        left = True
    if left:
        leak(*memory)
    return left
