"""What ranks do in the tests of failures, and what survivors must say."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sdp_plugins.core import Group, SdpError
from tests.core.values import Array
from tests.ranks import Outcome, Ranks, say

TIMEOUT_S = 180.0
"""Of groups whose ranks must be told of a failure sooner."""
NOTICE_S = 100.0
"""Ends a wait for a failure message, which takes milliseconds, on the busiest machine."""

# Sizes that take each path, and where the memory lies.
PATHS = {"inline": 1000, "staged": 2**20, "zero-copy": 2**20}


def memory(group: Group, path: str) -> Array:
    """A float32 buffer whose all_reduce takes the path; all zeros, so it never overflows."""
    count = PATHS[path]
    if path == "zero-copy":
        return np.frombuffer(group.allocate(4 * count), np.float32)
    return np.zeros(count, np.float32)


def reduce_until_it_fails(rank: int, world: int, path: str, timeout_s: float = TIMEOUT_S) -> None:
    """All-reduce without end."""
    with Group.from_env(timeout_s=timeout_s) as group:
        data = memory(group, path)
        for turn in itertools.count():
            group.all_reduce(data)
            if turn == 10:
                assert group.last_path == path
                say("going")


def lose(ranks: Ranks, victim: int, by: Callable[[], Any]) -> list[Outcome]:
    """Do something to the victim while all wait; the outcomes of the others, in rank order."""
    for rank in ranks:
        assert rank.heard() == "going"
        rank.until_asleep()
    by()
    return [rank.outcome() for rank in ranks if rank.rank != victim]


def assert_failed(
    outcomes: list[Outcome],
    kind: type[SdpError],
    *,
    ranks: tuple[int, ...],
    op: str,
    text: str,
    since: float,
    within_s: float = NOTICE_S,
    not_before_s: float = 0.0,
) -> list[SdpError]:
    """Every outcome is this error, names these ranks and came in time; the errors.

    `text` is a regular expression for what lies between the head and the hint.
    """
    errors = []
    for outcome in outcomes:
        error = outcome.error
        assert type(error) is kind, f"{outcome.kind}: {error!r}\n{outcome.traceback}"
        assert isinstance(error, SdpError)
        assert (error.ranks, error.op) == (ranks, op), str(error)
        assert error.seq > 0 and error.elapsed_s >= 0
        head = rf"\[rank \d/\d\] {op} #{error.seq}\b.*"
        assert re.fullmatch(rf"{head}{text}.* Hint: .+\.", str(error)), str(error)
        assert not_before_s <= outcome.ended_at - since <= within_s, outcome.ended_at - since
        errors.append(error)
    return errors


def now() -> float:
    """The clock of `Outcome.ended_at`."""
    return time.monotonic()
