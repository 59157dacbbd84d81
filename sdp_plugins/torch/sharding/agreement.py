"""What ranks tell each other when they meet, and why they cannot go on if they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum


class Call(Enum):
    """What a rank does with the gradients of all ranks."""

    CHANGE = "clips or scales averages before its step"
    STEP = "updates weights"
    STEP_AFTER_CHANGES = "updates weights by averages that it has changed"


def differing(names: Sequence[str], changed: bool) -> str:
    """Why ranks cannot go on that have changed these weights or states differently."""
    return (
        f"the ranks have changed {', '.join(names[:5])} to different values since the last step; "
        f"this rank has changed {'some' if changed else 'nothing'}. Hint: change weights and state "
        "alike on all ranks, or broadcast them."
    )


def mistake_of(calls: Mapping[Call, int], replaced: bool, digests: Sequence[int]) -> str:
    """Why ranks that do these things, some each, cannot go on; empty if they can."""
    steps = calls[Call.STEP] or calls[Call.STEP_AFTER_CHANGES]
    if steps and calls[Call.CHANGE]:  # where torch's clipping finds no gradient, it does nothing
        return (
            "some ranks clip or scale gradients before step(), and others do not. Hint: do it on "
            "all ranks; where a rank may have no gradient of a parameter, by the optimizer's "
            "clip_grad_norm_() or clip_grad_value_()."
        )
    if replaced or (calls[Call.STEP] and calls[Call.STEP_AFTER_CHANGES]):
        return (
            "step(): gradients were dropped or replaced after they were clipped or scaled. Hint: "
            "do so before; or drop all of them, on all ranks."
        )
    most, least = digests[:4], digests[4:]
    if any(high + low != 255 for high, low in zip(most, least, strict=True)):
        return (
            "step(): the ranks have clipped or scaled gradients by different factors. Hint: clip "
            "only parameters that this optimizer updates, and freeze the others with "
            "requires_grad_(False): nobody averages their gradients."
        )
    return ""
