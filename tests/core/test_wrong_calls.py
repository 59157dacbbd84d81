"""Calls that are wrong raise before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest

from sdp_plugins.core import Group
from tests.core.kept_group import kept_group
from tests.ranks import Pool

f32, i32 = np.float32, np.int32
SECONDS = "Hint: pass seconds, such as 300, or none for the group's."
WRONG: dict[str, tuple[Callable[[Group], object], type[Exception], str]] = {
    "all_gather size": (
        lambda g: g.all_gather(np.zeros(5, f32), np.zeros(3, f32)),
        ValueError,
        "all_gather: the output has 5 elements, but 6 are needed in a group of 2",
    ),
    "all_gather dtypes": (
        lambda g: g.all_gather(np.zeros(6, i32), np.zeros(3, f32)),
        TypeError,
        "all_gather: all buffers must have one element type, got float32, int32",
    ),
    "all_gather_uneven outputs": (
        lambda g: g.all_gather_uneven([np.zeros(3)], np.zeros(3)),
        ValueError,
        "all_gather: needs 2 output buffer(s), got 1",
    ),
    "all_gather_uneven own output": (
        lambda g: g.all_gather_uneven([np.zeros(3)] * 2, np.zeros(4)),
        ValueError,
        "all_gather: this rank's own output has 3 elements, its input 4",
    ),
    "reduce_scatter size": (
        lambda g: g.reduce_scatter(np.zeros(3), np.zeros(5)),
        ValueError,
        "reduce_scatter: the input has 5 elements, but 6 are needed in a group of 2",
    ),
    "broadcast root": (
        lambda g: g.broadcast(np.zeros(3), 2),
        ValueError,
        "broadcast: root 2 is not a rank of this group of 2",
    ),
    "reduce root": (
        lambda g: g.reduce(np.zeros(3), -1),
        ValueError,
        "reduce: root -1 is not a rank of this group of 2",
    ),
    "gather without outputs": (
        lambda g: g.gather(None, np.zeros(3), g.rank),
        ValueError,
        "gather: needs 2 output buffer(s), got 0",
    ),
    "gather with outputs elsewhere": (
        lambda g: g.gather([np.zeros(3)] * 2, np.zeros(3), 1 - g.rank),
        ValueError,
        "gather: needs 0 output buffer(s), got 2",
    ),
    "scatter without inputs": (
        lambda g: g.scatter(np.zeros(3), None, g.rank),
        ValueError,
        "scatter: needs 2 input buffer(s), got 0",
    ),
    "scatter dtypes": (
        lambda g: g.scatter(np.zeros(3), [np.zeros(3, i32)] * 2, g.rank),
        TypeError,
        "scatter: all buffers must have one element type, got float64, int32",
    ),
    "all_to_all odd": (
        lambda g: g.all_to_all(np.zeros(4), np.zeros(5)),
        ValueError,
        "all_to_all: the input has 5 elements, which 2 ranks cannot share equally. "
        "Hint: give the splits.",
    ),
    "all_to_all splits' sum": (
        lambda g: g.all_to_all(np.zeros(4), np.zeros(5), None, [2, 2]),
        ValueError,
        "all_to_all: the input has 5 elements, but its splits are [2, 2] for 2 ranks",
    ),
    "all_to_all splits' number": (
        lambda g: g.all_to_all(np.zeros(5), np.zeros(4), [5]),
        ValueError,
        "all_to_all: the output has 5 elements, but its splits are [5] for 2 ranks",
    ),
    "all_to_all negative split": (
        lambda g: g.all_to_all(np.zeros(5), np.zeros(4), [6, -1]),
        ValueError,
        "all_to_all: the output has 5 elements, but its splits are [6, -1] for 2 ranks",
    ),
    "no time": (
        lambda g: g.all_reduce(np.zeros(3), timeout_s=0),
        ValueError,
        "all_reduce: the time-out must be positive and finite, not 0 s. " + SECONDS,
    ),
    "not a time": (
        lambda g: g.barrier(timeout_s=float("nan"), async_op=True),
        ValueError,
        "barrier: the time-out must be positive and finite, not nan s. " + SECONDS,
    ),
    "for ever": (
        lambda g: g.send(np.zeros(3), 0, timeout_s=float("inf")),
        ValueError,
        "send: the time-out must be positive and finite, not inf s. " + SECONDS,
    ),
    "read-only output": (
        lambda g: g.all_reduce(b"1234"),
        ValueError,
        "the array is read-only, but would be written. Hint: pass a copy.",
    ),
}


def call_wrongly(rank: int, world: int) -> list[str]:
    """Only one rank errs, each in turn: had anything been sent, the barrier would not agree."""
    group = kept_group()
    wrong = []
    for culprit in range(world):
        for case, (call, kind, text) in WRONG.items():
            if rank == culprit:
                try:
                    call(group)
                    wrong.append(f"{case}: accepted")
                except (ValueError, TypeError) as error:
                    if type(error) is not kind or str(error) != text:
                        wrong.append(f"{case}: {error!r}")
            group.barrier()
    return wrong


def test_wrong_calls_raise_before_anything_is_sent(rank_pool: Pool) -> None:
    assert rank_pool(2).run(call_wrongly) == [[], []]


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_a_group_needs_a_finite_time_out(timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"must be positive and finite, not .*\. Hint: "):
        Group.from_env(timeout_s=timeout_s)
    with Group.from_env() as group, pytest.raises(ValueError, match="Hint: "):
        group.new_group([0], timeout_s=timeout_s)


def test_a_time_out_for_ever_is_one_of_years() -> None:
    with Group.from_env(timeout_s=timedelta.max.total_seconds()) as group:
        assert group.timeout_s == 1e8
        group.barrier()
