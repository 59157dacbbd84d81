"""Who goes on when some ranks are missing."""

from __future__ import annotations

import pytest

from sdp_plugins.core.regroup import Handle, Member, Roster

A, B, C, D, E = (Handle("h", port, "s") for port in range(1, 6))
FOUR = Roster(7, tuple(Member(number, handle) for number, handle in enumerate((A, B, C, D))))


@pytest.mark.parametrize(
    ("present", "dead", "goes_on"),
    [
        ([A, B, C, D], [], True),
        ([B, C, D], [], True),
        ([A, B], [], True),  # half, with the lowest
        ([C, D], [], False),
        ([A], [], False),
        ([D], [A, B, C], True),  # nobody else lives
        ([C, D], [A], True),
        ([C], [A, B], True),  # half of those that live, with the lowest of them
        ([D], [A, B], False),
        ([C], [A, B, D], True),
        ([], [A, B, C, D], False),
        ([A, E], [], False),  # who is no member has no vote
    ],
)
def test_quorum(present: list[Handle], dead: list[Handle], goes_on: bool) -> None:
    assert FOUR.has_quorum(present, dead) is goes_on


def test_two_parts_never_both_go_on() -> None:
    handles = FOUR.handles
    for split in range(2**4):
        part = [handle for i, handle in enumerate(handles) if split >> i & 1]
        rest = [handle for handle in handles if handle not in part]
        assert FOUR.has_quorum(part, []) != FOUR.has_quorum(rest, [])


@pytest.mark.parametrize(
    ("present", "joining", "numbers"),
    [
        ([A, B, C, D], [], [0, 1, 2, 3]),
        ([B, D], [], [1, 3]),
        ([B, D], [0], [0, 1, 3]),
        ([B, D], [7], [1, 3, 7]),
        ([B, D], [3], [0, 1, 3]),  # taken: the lowest that is free
        ([A, B, C, D], [2], [0, 1, 2, 3, 4]),
        ([A], [-1], [0, 1]),
    ],
)
def test_numbers(present: list[Handle], joining: list[int], numbers: list[int]) -> None:
    roster = FOUR.next(present, [Member(number, E) for number in joining])
    assert roster.view == 8
    assert [member.number for member in roster.members] == numbers
    assert {*present} <= {*roster.handles} <= {*present, E}


def test_two_that_join_with_one_number_have_two() -> None:
    roster = FOUR.next([A, B], [Member(2, C), Member(2, E)])
    assert [member.number for member in roster.members] == [0, 1, 2, 3]


def test_rosters_and_handles_are_read_as_they_were_written() -> None:
    assert Roster.from_json(FOUR.to_json()) == FOUR
    for handle in (A, Handle("10.0.0.1", 65535, "ab"), Handle("fe80::1%eth0", 1, "c")):
        assert Handle.parse(str(handle)) == handle
    for text in ("", "host", "host:1", "host:0/s", "host:65536/s", ":1/s", "host:x/s", "host:1/"):
        with pytest.raises(ValueError, match="HOST:PORT/SECRET"):
            Handle.parse(text)
