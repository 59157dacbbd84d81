"""Each rank's position in a ``fit``, and the check that all ranks agree on it.

At the end of each epoch the ranks compare a checksum of their weights and whether training is to
stop. If one rank alone leaves the steps of an epoch, its next collective does not match the
others'. All ranks then fail, and exchange their positions in a separate group.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import ops

from sdp_plugins.core import CollectiveMismatchError, SdpError
from sdp_plugins.core.tensor_lists import as_bytes

from .variables import optimizers_of, partial_sums

if TYPE_CHECKING:
    from sdp_plugins.core import Group

ANSWER_LIMIT_S = 30.0
_HINT_STOP = (
    "Hint: give all ranks the same callbacks, and have them decide by the logs, which are the same "
    "on all ranks. Generators must yield equally many batches on all ranks."
)
_HINT_WEIGHTS = (
    "Hint: a callback that assigns variables must assign the same on all ranks; or have rank 0 "
    "assign them and copy them by strategy.broadcast_variables()."
)
# Relative to a variable's largest value: about a tenth of the square root of the type's precision.
_TOLERANCE = {"float64": 1e-9, "float32": 3e-5, "bfloat16": 1e-2, "float16": 3e-3}


@dataclass
class Progress:
    """A rank's position.

    Attributes:
        call: The running method, such as ``fit``.
        epoch: The epoch, counted from 1.
        steps: Batches of the epoch that were trained on.
        ended: Whether the rank takes no more steps of this epoch.
        stop: Whether ``stop_training`` is set.
    """

    call: str = ""
    epoch: int = 0
    steps: int = 0
    ended: bool = False
    stop: bool = False


def explain(progress: Progress, group: Group) -> CollectiveMismatchError | None:
    """Find the rank that has left the steps of an epoch that others continue.

    Args:
        progress: The position of this rank, whose collective did not match the others'.
        group: A group of all ranks for this purpose only.

    Returns:
        The error, or None if the failure has another cause.
    """
    if group.world_size == 1 or group.failure is not None or group.closed:
        return None
    blob = json.dumps(asdict(progress)).encode()
    try:
        everyones = [Progress(**json.loads(each)) for each in group.exchange(blob, ANSWER_LIMIT_S)]
    except SdpError:
        return None  # a rank failed for another reason
    stopped = [rank for rank, each in enumerate(everyones) if each.ended]
    if {each.call for each in everyones} != {"fit"} or len(stopped) in (0, group.world_size):
        return None
    rank, theirs = stopped[0], everyones[stopped[0]]
    others = next(each for each in everyones if not each.ended)
    why = "stop_training is set there" if theirs.stop else "its data has ended"
    return CollectiveMismatchError(
        f"[rank {group.rank}/{group.world_size}] fit(): rank {rank} has stopped after step "
        f"{theirs.steps} of epoch {theirs.epoch} ({why}); others go on with epoch {others.epoch}. "
        f"{_HINT_STOP}",
        ranks=(rank,),
        op="fit",
    )


def compare_epoch(model: Any, group: Group, progress: Progress, may_round: bool) -> None:
    """Check that all ranks have the same weights and agree whether to stop training.

    Ranks compare a checksum of each variable; where checksums differ, they compare values with rank
    0's.

    Args:
        model: The trained model.
        group: A group of all ranks.
        progress: The position of this rank.
        may_round: Whether the backend compiles each rank's step separately, so that ranks may round
            an update differently; otherwise all bits are equal.

    Raises:
        CollectiveMismatchError: The ranks differ.
    """
    compared = _compared(model)
    sums = [_checksum(variable) for variable in compared]
    mine = json.dumps([bool(model.stop_training), sums])
    everyones = [json.loads(each) for each in group.exchange(mine.encode())]
    head = f"[rank {group.rank}/{group.world_size}] fit(): "
    _compare_stops([stop for stop, _ in everyones], head, progress.epoch)
    first = everyones[0][1]
    suspects = [
        variable
        for index, variable in enumerate(compared)
        if any(others[index] != first[index] for _, others in everyones)
    ]
    if (found := _first_that_differs(suspects, group, may_round)) is not None:
        rank, variable = found
        raise CollectiveMismatchError(
            f"{head}rank {rank} has other values than rank 0 after epoch {progress.epoch}, "
            f"first in '{variable.path}'. {_HINT_WEIGHTS}",
            ranks=(rank,),
            op="fit",
        )


def _compare_stops(stops: Sequence[bool], head: str, epoch: int) -> None:
    if any(stops) and not all(stops):
        rank = stops.index(True)
        raise CollectiveMismatchError(
            f"{head}rank {rank} has stopped after epoch {epoch} (stop_training is set there), rank "
            f"{stops.index(False)} goes on. {_HINT_STOP}",
            ranks=(rank,),
            op="fit",
        )


def _first_that_differs(
    variables: Sequence[Any], group: Group, may_round: bool
) -> tuple[int, Any] | None:
    """Return the rank and the first variable in which it differs from rank 0, or None."""
    for variable in variables:
        here = np.ascontiguousarray(ops.convert_to_numpy(variable))
        root = here.copy()
        group.broadcast(as_bytes(root), 0)
        verdicts = group.exchange(bytes([_differs(here, root, may_round)]))
        rank = next((rank for rank, verdict in enumerate(verdicts) if verdict[0]), None)
        if rank is not None:
            return rank, variable
    return None


def _differs(here: np.ndarray[Any, Any], root: np.ndarray[Any, Any], may_round: bool) -> bool:
    """Return whether values differ, beyond accumulated rounding errors if `may_round`."""
    tolerance = _TOLERANCE.get(here.dtype.name) if may_round else None
    if tolerance is None:
        return here.tobytes() != root.tobytes()
    wide, expected = here.astype(np.float64), root.astype(np.float64)
    finite = np.abs(expected[np.isfinite(expected)])
    limit = tolerance * float(np.max(finite, initial=0.0))
    return not np.allclose(wide, expected, rtol=0.0, atol=limit, equal_nan=True)


def _compared(model: Any) -> list[Any]:
    """Return weights, and scalars of optimizers such as the learning rate.

    Random states and partial sums of gradients are specific to each rank.
    """
    numbers = []
    for optimizer in optimizers_of(model):
        own = {id(variable) for variable in partial_sums(optimizer)}
        numbers += [v for v in optimizer.variables if len(v.shape) == 0 and id(v) not in own]
    return [*model.weights, *numbers]


def _checksum(variable: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(ops.convert_to_numpy(variable)).view(np.uint8).data)
