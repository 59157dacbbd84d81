"""What the ranks that are left of an elastic job tell each other, so that all are equally far."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .error_file import sdp_error_in
from .errors import CollectiveTimeoutError, PeerLostError, RendezvousError, SdpError
from .group import Group

JOINS = -2
"""How far a process has come that joins a job."""


def lost(error: BaseException) -> SdpError:
    """Return why ranks are missing, so that the others go on; raise any other error again."""
    failure = sdp_error_in(error)
    if isinstance(failure, (PeerLostError, CollectiveTimeoutError)) or (
        failure is not None and failure.kind == "aborted"
    ):
        return failure
    raise error


def is_asked(group: Group, waiting: int, progress: Sequence[int] = ()) -> bool:
    """Return whether processes wait to join, as far as any rank knows; a collective.

    Args:
        group: The ranks.
        waiting: How many wait, as this rank knows.
        progress: How far this rank has come, which is compared.

    Raises:
        RuntimeError: The ranks have not come equally far.
    """
    most = np.array([waiting, *progress, *(-number for number in progress)])
    group.all_reduce(most, "max")
    asked, *told = most.tolist()
    highest, lowest = told[: len(progress)], [-number for number in told[len(progress) :]]
    if highest != lowest:
        raise RuntimeError(
            f"the ranks have come to different places in the training: this one to {[*progress]}, "
            f"all of them from {lowest} to {highest}. Hint: leave loops at places that depend on "
            "the job's progress, not on this process's own count of steps, which a process that "
            "joins begins anew."
        )
    return bool(asked)


def catch_up(
    group: Group,
    progress: Sequence[int],
    give: Callable[[Group], None],
    take: Callable[[Group], None],
) -> bool:
    """Give the state of the rank that has come farthest to those that have not; a collective.

    Args:
        group: The ranks.
        progress: How far this rank has come; negative if it has no state yet, and `JOINS` if it
            joins a job. If none has come farther, rank 0's is that of all.
        give: Sends this rank's state to the other ranks of a group, of which it is rank 0; called
            on the rank that has come farthest.
        take: Receives it; called on those that have not come so far.

    Returns:
        Whether this rank has taken over another one's state.

    Raises:
        RendezvousError: All ranks join, and none has the job's state any more.
    """
    told = [json.loads(blob) for blob in group.exchange(json.dumps(progress).encode())]
    farthest = max(told)
    if farthest[0] == JOINS:
        raise RendezvousError(
            f"{group.error_prefix}the ranks that have trained until now have ended before this one "
            "had their state. Hint: start the job again, from its last checkpoint."
        )
    source = told.index(farthest)
    behind = [rank for rank, one in enumerate(told) if one != farthest or farthest[0] < 0]
    if source in behind:
        behind.remove(source)
    part = group.new_group([source, *behind], name="state") if behind else None
    if part is None:
        return False
    with part:
        if part.rank == 0:
            give(part)
            return False
        take(part)
        return True


def send(group: Group, state: Any) -> None:
    """Send a state from rank 0 to all other ranks of a group, which call ``receive``.

    Arrays of NumPy travel as they are, one after the other, and the rest by pickle.
    """
    buffers: list[pickle.PickleBuffer] = []
    rest = pickle.dumps(state, protocol=5, buffer_callback=buffers.append)
    parts = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    parts.append(np.frombuffer(rest, np.uint8))
    group.broadcast(np.array([len(parts)]), 0)
    group.broadcast(np.array([part.size for part in parts]), 0)
    for part in parts:
        if part.size:
            group.broadcast(part, 0)


def receive(group: Group) -> Any:
    """Receive the state that rank 0 sends."""
    count = np.zeros(1, np.int64)
    group.broadcast(count, 0)
    sizes = np.zeros(int(count[0]), np.int64)
    group.broadcast(sizes, 0)
    parts = [np.empty(int(size), np.uint8) for size in sizes]
    for part in parts:
        if part.size:
            group.broadcast(part, 0)
    return pickle.loads(parts[-1].tobytes(), buffers=parts[:-1])
