"""Each rank's position in a ``fit``, and the checks that all ranks agree on it and on the weights.

At the end of each epoch the ranks compare whether training is to stop, and checksums of their
weights; later calls of other methods compare checksums, too. If one rank alone leaves the steps of
an epoch, its next collective does not match the others'. All ranks then fail, and exchange their
positions in a separate group.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from sdp_plugins.core import CollectiveMismatchError, SdpError
from sdp_plugins.core.tensor_lists import to_move

from .variables import optimizers_of, partial_sums

if TYPE_CHECKING:
    from sdp_plugins.core import Group

    from .backends.base import Backend

ANSWER_LIMIT_S = 30.0
_HINT_STOP = (
    "Hint: give all ranks the same callbacks, and have them decide by the logs, which are the same "
    "on all ranks. Generators must yield equally many batches on all ranks."
)
_HINT_WEIGHTS = (
    "Hint: assign and load weights on all ranks alike, also in callbacks; or have rank 0 do it, "
    "and copy them by strategy.broadcast_variables(). A train_step must update weights by Keras "
    "optimizers that are attributes of the model, whose gradients are averaged."
)
ELEMENTS_OF_A_BATCH = 2**16  # and less than twice as many: checksums take 0.5 ms at most
# Relative to a variable's largest value: about a tenth of the square root of the type's precision.
_TOLERANCE = {"float64": 1e-9, "float32": 3e-5, "bfloat16": 1e-2, "float16": 3e-3}
_Values = Sequence[tuple[Any, np.ndarray[Any, Any]]]  # variables, and elements on this rank


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

    The ranks, whose collectives did not match, exchange their positions in a group for this purpose
    only. Returns the error, or None if the failure has another cause.
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
    if (others.epoch, others.steps) < (theirs.epoch, theirs.steps):
        return CollectiveMismatchError(
            f"{group.error_prefix}fit(): rank {rank} has ended it, and others have called it "
            "again. Hint: call the same methods in the same order on all ranks.",
            ranks=(rank,),
            op="fit",
        )
    why = "stop_training is set there" if theirs.stop else "its data has ended"
    return CollectiveMismatchError(
        f"{group.error_prefix}fit(): rank {rank} has stopped after step "
        f"{theirs.steps} of epoch {theirs.epoch} ({why}); others go on with epoch {others.epoch}. "
        f"{_HINT_STOP}",
        ranks=(rank,),
        op="fit",
    )


def exchange(group: Group, call: str, mine: Any) -> list[Any]:
    """Give all ranks what each one sends, as JSON, with its call of a method of a model.

    Raises:
        CollectiveMismatchError: The ranks call different methods.
    """
    blobs = group.exchange(json.dumps([call, mine]).encode())
    calls, everyones = zip(*map(json.loads, blobs), strict=True)
    for rank, theirs in enumerate(calls):
        if theirs != call:
            raise CollectiveMismatchError(
                f"{group.error_prefix}{call}(): rank {rank} has called "
                f"{theirs}(). Hint: call the same methods in the same order on all ranks.",
                ranks=(rank,),
                op=call,
            )
    return list(everyones)


def gradient_on_some_ranks(variable: Any) -> RuntimeError:
    """Return the error for a variable of which only some ranks have a gradient."""
    return RuntimeError(
        f"'{variable.path}' got a gradient on some ranks only, in the same step. Hint: a model "
        "must use the same layers on all ranks, whatever its data."
    )


def check_epoch_end(model: Any, group: Group, backend: Backend, progress: Progress) -> None:
    """Check that all ranks end ``fit`` after this epoch or none does, and have the same weights.

    Raises:
        CollectiveMismatchError: The ranks differ.
    """
    values, _ = _values(model, backend)
    everyones = exchange(group, "fit", [progress.stop, _checksums(values)])
    stops, checksums = zip(*everyones, strict=True)
    _refuse_other_stops(group, progress.epoch, stops)
    when = f" after epoch {progress.epoch}"
    _refuse_other_weights(group, "fit", when, values, checksums, backend.is_stateless)


def check_weights(
    model: Any, group: Group, backend: Backend, call: str, begin: int = 0, count: int = 0
) -> int:
    """Check that all ranks have the same weights, and the same numbers in their optimizers.

    They compare about `count` elements, from the part `begin` on; 0 compares all. Returns the part
    with which the next check should begin.

    Raises:
        CollectiveMismatchError: The ranks differ, or call different methods.
    """
    values, after = _values(model, backend, begin, count)
    checksums = exchange(group, call, _checksums(values))
    _refuse_other_weights(group, call, "", values, checksums, backend.is_stateless)
    return after


def _refuse_other_stops(group: Group, epoch: int, stops: Sequence[bool]) -> None:
    if any(stops) and not all(stops):
        rank = stops.index(True)
        raise CollectiveMismatchError(
            f"{group.error_prefix}fit(): rank {rank} has stopped after epoch "
            f"{epoch} (stop_training is set there), rank {stops.index(False)} goes on. "
            f"{_HINT_STOP}",
            ranks=(rank,),
            op="fit",
        )


def _refuse_other_weights(
    group: Group, call: str, when: str, values: _Values, everyones: Sequence[Any], may_round: bool
) -> None:
    """Compare the ranks' checksums; where they differ, compare values with rank 0's."""
    for rank, theirs in enumerate(everyones):
        if len(theirs) != len(values):
            raise CollectiveMismatchError(
                f"{group.error_prefix}{call}(): rank {rank} has more or fewer "
                "variables. Hint: build and compile the same model on all ranks.",
                ranks=(rank,),
                op=call,
            )
    suspects = [
        each
        for each, *sums in zip(values, *everyones, strict=True)
        if any(other != sums[0] for other in sums)
    ]
    if (found := _first_that_differs(suspects, group, may_round)) is not None:
        rank, variable = found
        raise CollectiveMismatchError(
            f"{group.error_prefix}{call}(): rank {rank} has other values than "
            f"rank 0{when}, first in '{variable.path}'. {_HINT_WEIGHTS}",
            ranks=(rank,),
            op=call,
        )


def _values(model: Any, backend: Backend, begin: int = 0, count: int = 0) -> tuple[_Values, int]:
    """Return what to compare, and the part with which to go on; see ``_parts``."""
    parts, after = _parts(_compared(model), begin, count)
    return [(variable, backend.elements(variable, part)) for variable, part in parts], after


def _parts(variables: Sequence[Any], begin: int, count: int) -> tuple[list[tuple[Any, slice]], int]:
    """Return variables, or parts of large ones, from the part `begin` on, and the next part.

    There are at least `count` elements in them, less than twice as many, and fewer at the end; the
    first part follows the last. A `count` of 0 returns all variables.
    """
    parts = []
    for variable in variables:
        size = math.prod(variable.shape)
        pieces = max(1, -(-size // count)) if count else 1  # equally large ones
        bounds = [size * piece // pieces for piece in range(pieces + 1)]
        parts += [(variable, slice(*pair)) for pair in pairwise(bounds)]
    if not count:
        return parts, 0
    end, taken = begin, 0
    while end < len(parts) and taken < count:
        taken += parts[end][1].stop - parts[end][1].start
        end += 1
    return parts[begin:end], end if end < len(parts) else 0


def _first_that_differs(compared: _Values, group: Group, may_round: bool) -> tuple[int, Any] | None:
    """Return the rank and the first variable in which it differs from rank 0, or None.

    Ranks `may_round` an update differently if the backend compiles each rank's step separately;
    otherwise all bits are equal.
    """
    for variable, here in compared:
        root = here.copy()
        group.broadcast(to_move(root), 0)
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


def _checksums(values: _Values) -> list[int]:
    return [zlib.crc32(elements.view(np.uint8).data) for _, elements in values]
