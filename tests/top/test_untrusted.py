"""Whatever a rank's memory holds, it is shown as text and numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from sdp_plugins.core import _native
from sdp_plugins.flight.jobs import Job
from sdp_plugins.flight.rank_snapshot import RankSnapshot, parse
from sdp_plugins.flight.wait_report import groups_of
from sdp_plugins.top.figures import figures_of
from sdp_plugins.top.plain_text import lines_of
from sdp_plugins.top.timeline import lanes_of
from sdp_plugins.top.view import view_of
from tests.flight.test_untrusted import raw  # noqa: F401 - a fixture

HEAD_BYTES = 576
AT = HEAD_BYTES + _native.FLIGHT_RANK_INFO_BYTES + 8 + _native.FLIGHT_FORMING_BYTES


def scribbled(raw: bytes) -> Iterator[bytes]:  # noqa: F811
    """The record of a rank with its counters and its rings overwritten."""
    length = len(raw) - AT
    for seed in range(40):
        noise = random.Random(seed)
        tail = bytes([noise.randrange(256)]) * length if seed < 10 else noise.randbytes(length)
        yield raw[:AT] + tail


def shown(before: RankSnapshot, now: RankSnapshot) -> str:
    """All that is made of two readings."""
    view = view_of(Job([], [now]), figures_of(groups_of([before]), groups_of([now])))
    lanes = [lane._asdict() for lane in lanes_of([now])]
    return "\n".join([*lines_of(view), json.dumps(lanes, allow_nan=False)])


def test_garbage_is_shown_as_text(raw: bytes) -> None:  # noqa: F811
    first = parse(raw)
    for garbage in scribbled(raw):
        later = parse(garbage)
        for before, now in ((first, later), (later, first), (later, later)):
            text = shown(before, now._replace(read_ns=before.read_ns + 10**9))
            assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize("read_ns", [0, 1, 2**63 - 1])
def test_clocks_that_jump(raw: bytes, read_ns: int) -> None:  # noqa: F811
    snapshot = parse(raw)
    assert shown(snapshot, snapshot._replace(read_ns=read_ns))
