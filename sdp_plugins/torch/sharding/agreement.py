"""What ranks tell each other when they meet, and why they cannot go on if they differ."""

from __future__ import annotations

import pickle
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from sdp_plugins.core import Group, SdpError
from sdp_plugins.core.rank_names import name_ranks

Settings = Mapping[str, object]
"""What must be equal on all ranks, by names for messages."""
NO_SETTINGS: Settings = MappingProxyType({})


class Call(Enum):
    """What a rank does with the gradients of all ranks, for messages."""

    CHANGE = "clipping, scaling or a norm of gradients"
    CHANGE_AGAIN = "clipping, scaling or a norm of gradients, after another one"
    STEP = "step()"
    STEP_AFTER_CHANGES = "step(), after gradients were clipped or scaled"


class StepState(NamedTuple):
    """What must be equal on all ranks in a step.

    Attributes:
        changes: A digest, below 2^32, of what was done to the averages.
        settings: Of the parameter groups, and of whether state was loaded.
    """

    changes: int = 0
    settings: Settings = NO_SETTINGS


def flags_of(call: Call, replaced: bool, state: StepState) -> list[int]:
    """A rank's part of the message whose maximum over all ranks `mistake_of` reads.

    Args:
        call: What the rank does.
        replaced: Whether its gradients were dropped or replaced since it changed averages.
        state: Of this rank.
    """
    flags = [int(call is each) for each in Call] + [int(replaced)]
    for digest in state.changes, zlib.crc32(text_of(state.settings).encode()):
        numbers = digest.to_bytes(4, "little")
        flags += [*numbers, *(255 - number for number in numbers)]
    return flags


def mistake_of(flags: Sequence[int], group: Group, settings: Settings) -> str:
    """Why ranks with these flags, some each, cannot go on; empty if they can.

    A collective if their settings differ, which all ranks see.
    """
    calls = dict(zip(Call, flags, strict=False))
    replaced, *digests = flags[len(Call) :]
    steps = calls[Call.STEP] or calls[Call.STEP_AFTER_CHANGES]
    if steps and (calls[Call.CHANGE] or calls[Call.CHANGE_AGAIN]):
        # Where torch's clipping finds no gradient, it does nothing.
        return (
            "some ranks clip or scale gradients, or read norms of them, before step(), and others "
            "do not. Hint: do it on all ranks; where a rank may have no gradient of a parameter, "
            "by the optimizer's clip_grad_norm_() or clip_grad_value_()."
        )
    if replaced or (calls[Call.STEP] and calls[Call.STEP_AFTER_CHANGES]):
        return (
            "step(): gradients were dropped or replaced after they were clipped or scaled. Hint: "
            "do so before; or drop all of them, on all ranks."
        )
    if _differ(digests[:8]):
        return (
            "step(): the ranks have clipped or scaled gradients by different factors. Hint: clip "
            "only parameters that this optimizer updates, and freeze the others with "
            "requires_grad_(False): nobody averages their gradients."
        )
    if _differ(digests[8:]):
        return (
            f"step(): other settings {difference(group, settings)}. Hint: change settings, such as "
            "lr, alike on all ranks (a scheduler that follows a loss needs its average over the "
            "ranks), and call load_state_dict() on all."
        )
    return ""


def difference(group: Group, settings: Settings) -> str:
    """Which ranks have other settings than rank 0, and the first of them; a collective."""
    mine = {name: text_of(value) for name, value in settings.items()}
    everyones = [pickle.loads(blob) for blob in group.exchange(pickle.dumps(mine))]
    first, names = everyones[0], list(map(group.nodes.global_rank, range(group.world_size)))
    others = [rank for rank, theirs in enumerate(everyones) if theirs != first]
    other = everyones[others[0]]
    name = next(name for name in [*first, *other] if first.get(name) != other.get(name))
    return (
        f"on {name_ranks(names[rank] for rank in others)} than on rank {names[0]}; {name}: "
        f"{first.get(name, 'none')} on rank {names[0]}, {other.get(name, 'none')} on rank "
        f"{names[others[0]]}"
    )


def text_of(value: object) -> str:
    """What is equal for equal values: in one order, with all digits, without addresses."""
    if isinstance(value, str):
        return value
    if isinstance(value, Tensor):
        return f"{value.dtype} {value.tolist()}"
    if isinstance(value, Mapping):
        items = sorted(f"{text_of(key)}: {text_of(one)}" for key, one in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(text_of, value)))}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(text_of, value))}]"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def meet(
    program: Group,
    known: Tensor,
    flags: Sequence[int],
    settings: Settings,
    watched: Sequence[str],
    new: Mapping[int, int] | None,
) -> tuple[Tensor, str]:
    """Give all ranks the maxima of all ranks' flags; a collective, of one message.

    Args:
        program: The program's group.
        known: Flags of the parameters, 0 or 1.
        flags: See `flags_of`.
        settings: This rank's.
        watched: Names of what the program must change alike on all ranks.
        new: Digests of those that it has changed since the last step; None: too early to tell.

    Returns:
        The parameters' flags, and why the ranks cannot go on; empty if they can.
    """
    states = torch.zeros(2, len(watched), 4, dtype=torch.uint8)
    if new is not None:
        for index, value in new.items():
            states[0, index] = torch.tensor(list(value.to_bytes(4, "little")))
        states[1] = 255 - states[0]
    parts = known.flatten(), states.flatten(), torch.tensor(flags, dtype=torch.uint8)
    message = torch.cat(parts)
    program.all_reduce(message, "max")
    found, states, last = message.split([part.numel() for part in parts])
    mistake = mistake_of(last.tolist(), program, settings)
    if new is not None and not mistake:
        most, most_of_complement = states.view(2, -1, 4)
        differing = (most != 255 - most_of_complement).any(1).nonzero().flatten().tolist()
        if differing:
            names = ", ".join(watched[index] for index in differing[:5])
            mistake = (
                f"the ranks have changed {names} to different values since the last step; this "
                f"rank has changed {'some' if new else 'nothing'}. Hint: change weights and state "
                "alike on all ranks, or broadcast them."
            )
    return found.view_as(known), mistake


_HOW = {
    "closed": ": call it before destroy_process_group()",
    "mismatch": ": call it on all ranks",
    "timeout": ": call it on all ranks",
}
"""How to call what has failed, by the kind of error."""


@contextmanager
def naming(what: str, owner: str = "ShardedOptimizer") -> Iterator[None]:
    """Have errors of the core, which name an operation, tell what the program has called."""
    try:
        yield
    except SdpError as error:
        if owner not in str(error):
            how = _HOW.get(error.kind, "")
            error.args = (f"{error} In {owner}, this was {what}{how}.",)
        raise


def _differ(most: Sequence[int]) -> bool:
    """Whether ranks differ in a number, by the maxima of its bytes and of their complements."""
    return any(high + low != 255 for high, low in zip(most[:4], most[4:], strict=True))
