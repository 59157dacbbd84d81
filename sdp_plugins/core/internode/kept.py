"""Memory that a network may still use when its operation has failed."""

from __future__ import annotations

from .call import Call

_kept: list[object] = []


def keep(*memory: object) -> None:
    """Hold memory for the life of the process.

    MPI may write into the memory of a receive that could not be cancelled, or read that of a send,
    whenever anybody in this process calls it next. Nothing tells when it is done with that, and
    what else came to lie there would be overwritten, or sent.
    """
    _kept.extend(memory)


def abandon(call: Call, *memory: object) -> bool:
    """Give up a failed operation's messages; never raises.

    Args:
        call: The operation.
        memory: Kept if some messages are still on their way.

    Returns:
        Whether they are.
    """
    try:
        left = call.abandon()
    except BaseException:  # nobody knows then
        left = True
    if left:
        keep(*memory)
    return left
