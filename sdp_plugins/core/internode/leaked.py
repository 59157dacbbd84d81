"""Memory that is never freed, because a network may still use it after a failure."""

from __future__ import annotations

from .operation import Operation

_leaked: list[object] = []


def leak(*memory: object) -> None:
    """Hold memory for the life of the process.

    MPI may write into the memory of a receive that could not be cancelled, or read that of a send,
    whenever anybody in this process calls it next. Nothing tells when it is done with that, and
    what else came to lie there would be overwritten, or sent.
    """
    _leaked.extend(memory)


def abandon(operation: Operation, *memory: object) -> bool:
    """Give up a failed operation's messages; never raises.

    Args:
        operation: The operation.
        memory: Kept if some messages are still on their way.

    Returns:
        Whether they are.
    """
    try:
        left = operation.abandon()
    except BaseException:  # nobody knows then
        left = True
    if left:
        leak(*memory)
    return left
