"""A short run of losses, and that a broken promise would be noticed."""

from __future__ import annotations

import random

import pytest

from stress.elastic.__main__ import EPOCHS, play
from stress.elastic.accuracy import compare, outcome
from stress.elastic.check import problems
from stress.elastic.job import Job
from stress.elastic.rank import Committed, Setting


@pytest.fixture(scope="module")
def job() -> Job:
    made = Job(3, Setting(60.0, EPOCHS), random.Random(5))
    assert play(made, ("kill", "kill 2"), 3) == []
    return made


@pytest.mark.may_leak(
    "processes", "fds", reason="multiprocessing's fork server lasts as long as the session"
)
def test_promises_are_kept(job: Job) -> None:
    assert [fault.kind for fault in job.faults if fault.kind != "join"] != []
    assert len(job.committed) > 20


def spoilt(committed: list[Committed], **changes: object) -> list[str]:
    at = len(committed) // 2
    broken = [*committed[:at], committed[at]._replace(**changes), *committed[at + 1 :]]
    return list(problems(broken, is_whole=False))


def test_broken_promises_are_noticed(job: Job) -> None:
    told = job.committed
    middle = told[len(told) // 2]
    assert "differ in digest" in spoilt(told, digest="0")[0]
    assert "differ in first" in spoilt(told, first=middle.first + 1)[0]
    assert "losses differ" in spoilt(told, loss=middle.loss * 1.001)[-1]
    gone = [one for one in told if one.step != middle.step]
    assert "steps are missing" in next(problems(gone, is_whole=False))
    first = [one._replace(first=one.first + 1) if one.step == 3 else one for one in told]
    assert "begins at" in next(problems(first, is_whole=False))


@pytest.mark.long
@pytest.mark.may_leak(
    "processes", "fds", reason="multiprocessing's fork server lasts as long as the session"
)
def test_kills_and_joins_do_not_change_what_is_learnt() -> None:
    kills, calm = outcome(4, 10, 1, 60.0), outcome(4, 0, 1, 60.0)
    assert compare(kills, calm) == []
    worse = kills._replace(accuracy=calm.accuracy - 0.05)
    assert "accuracies" in compare(worse, calm)[0]
