"""A short chaos run, and that a broken promise would be noticed."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from stress.chaos import promises
from stress.chaos.jobs import FAULTS, LIVES, Job, planned
from stress.chaos.play import play
from stress.chaos.promises import Fate, judge
from stress.chaos.rank import End

JOBS = (
    ("kill", "callbacks", 3, (0, 2)),
    ("stop", "collectives", 2, (1,)),
    ("raise", "ddp", 2, (0,)),
    ("other count", "asynchronous", 3, (2,)),
    ("stop", "creation", 3, (0,)),  # who serves torch's store
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For temporary files, which a job must not leave."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.may_leak("fds", reason="torch keeps a pipe of the first store that a process serves")
@pytest.mark.parametrize(("fault", "life", "world", "victims"), JOBS)
def test_promises_are_kept(
    fault: str, life: str, world: int, victims: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "MARGIN_S", 15.0)  # the machine may be busy
    job = Job(0, 0, world, life, fault, victims, 2.0, 0.1, 0.5, True, life == "creation", False)
    verdict, outputs = play(job)
    assert not verdict.problems, f"{job}\n{verdict.problems}\n{outputs}"


def test_a_plan_has_all_faults_in_all_lives() -> None:
    jobs = [planned(1, number) for number in range(1000)]
    assert {job.fault for job in jobs} == set(FAULTS)
    assert {job.life for job in jobs} == set(LIVES)
    assert {len(job.victims) for job in jobs} == {1, 2}
    assert all(set(job.victims) < set(range(job.world)) for job in jobs)
    assert any(job.launched for job in jobs) and planned(1, 7) == jobs[7]


JOB = Job(0, 0, 3, "collectives", "kill", (2,), 2.0, 0.1, 0.5, True, False, False)
LOST = End("PeerLostError", False, (2,), "rank 2 ended", 100.1, 0.1, 5)
BROKEN = {
    "told nothing": None,
    "ended with": replace(LOST, error="CollectiveTimeoutError"),
    "rank 0: ended with": replace(LOST, blamed=(1,), at=99.0),
    "s late": replace(LOST, at=102.1, waited_s=2.0),
    "after the fault": replace(LOST, at=220.0),
}


def ends(first: End | None, exitcode: int | None = 1) -> list[Fate]:
    exited_at = first.at if first else 100.0
    return [Fate(first, exitcode, exited_at), Fate(LOST, 1, 100.2), Fate(None, -9, 100.0)]


def test_a_kept_promise_is_seen_as_one() -> None:
    assert judge(JOB, ends(LOST), 100.0).problems == []
    stopped = replace(JOB, fault="stop")
    late = replace(LOST, error="CollectiveTimeoutError", at=102.1, waited_s=2.0)
    assert (
        judge(stopped, [Fate(late, 1, 102.2), Fate(late, 1, 102.2), Fate()], 100.0).problems == []
    )


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_promise_is_noticed(text: str) -> None:
    problems = judge(JOB, ends(BROKEN[text]), 100.0).problems
    assert text in " ".join(problems)


def test_a_process_that_stays_is_noticed() -> None:
    assert "did not end" in " ".join(judge(JOB, ends(LOST, None), 100.0).problems)
    assert judge(JOB, ends(LOST), 0.0).problems[0] == "it failed before the fault"
