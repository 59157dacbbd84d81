"""How long a step is, from what a rank has called."""

from __future__ import annotations

import pytest

from sdp_plugins.core.trace_event import FAILED, TraceEvent
from sdp_plugins.top.steps import operations_per_step


def events(calls: str) -> list[TraceEvent]:
    """One event for each letter; equal letters are equal calls."""
    return [
        TraceEvent(*(i, i, i, 0, i + 1, 0, ord(call), 4, -1, -1, -1, 9, 0, 0, 0, 0, 1, 0, 0, 0))
        for i, call in enumerate(calls, 1)
    ]


@pytest.mark.parametrize(
    ("calls", "length"),
    [
        ("", None),
        ("aa", None),
        ("aaaaaaaa", None),  # of how many is a step?
        ("abab", None),  # twice is no proof
        ("ababab", 2),
        ("babcababcababcab", 5),
        ("xyz" + "ab" * 10, 2),  # what came before the training
        ("ab" * 10 + "x", None),  # until enough steps follow
        ("ab" * 10 + "x" + "ab" * 11, 2),
        (("a" * 20 + "b") * 8 + "a" * 20, 21),  # not 1, though the last are equal
        ("abcdefgh", None),
    ],
)
def test_the_shortest_sequence_that_repeats(calls: str, length: int | None) -> None:
    assert operations_per_step(events(calls)) == length


def test_operations_that_run_or_failed_do_not_count() -> None:
    found = events("abababc")
    assert operations_per_step(found) is None
    running = [*found[:-1], found[-1]._replace(finished=0)]
    assert operations_per_step(running) == 2
    assert operations_per_step([*found[:-1], found[-1]._replace(flags=FAILED)]) == 2
