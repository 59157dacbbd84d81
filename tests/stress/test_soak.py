"""A short soak, and that it finds what it is to find."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from stress.soak.growth import LIMITS, Sample, growth
from stress.soak.rank import Settings
from stress.soak.run import run
from tests.ranks import RankFailure

QUIET = Sample(400 << 20, 200 << 20, 300 << 20, 240 << 20, 10**6, 24, 5, 12)


def soaked(world: int, steps: int, **more: Any) -> list[dict[str, Any]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run(world, Settings(7, 60.0, steps, store.port, **more))


@pytest.mark.may_leak("fds", reason="torch keeps a pipe of the first store that a process serves")
def test_random_collectives() -> None:
    for result in soaked(4, 300, checkpoint=75):
        assert result["steps"] == 300
        assert not growth(result["samples"])


@pytest.mark.parametrize(("what", "grows"), [("descriptor", "fds"), ("thread", "threads")])
def test_what_is_counted_must_not_grow(what: str, grows: str) -> None:
    for result in soaked(2, 300, checkpoint=30, spoil=what):
        assert grows in growth(result["samples"])


def test_a_wrong_value_is_found_and_can_be_seen_again() -> None:
    with pytest.raises(RankFailure) as caught:
        soaked(2, 300, spoil="values")
    text = str(caught.value)
    assert "differs" in text
    assert "Again: python -m stress.soak.run --ranks 2 --seed 7 --steps " in text


def noisy(draw: random.Random, what: str, leak: int = 0) -> list[Sample]:
    """Samples whose memory goes up and down, after a warm-up, and is lost bit by bit."""
    base, limit = getattr(QUIET, what), LIMITS[what]
    return [
        replace(QUIET, **{what: base - limit * (n < 5) + draw.randrange(limit // 2) + n * leak})
        for n in range(40)
    ]


@pytest.mark.parametrize("what", LIMITS)
def test_memory_may_fluctuate_but_not_grow(what: str) -> None:
    draw = random.Random(what)
    assert growth(noisy(draw, what)) == {}
    assert list(growth(noisy(draw, what, LIMITS[what] // 10))) == [what]
