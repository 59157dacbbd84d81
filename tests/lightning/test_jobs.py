"""Scripts that import only Lightning and start their own ranks, or are started as ranks."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.lightning.jobs import Ended, run_script

pytestmark = pytest.mark.timeout(120)


def check(job: Ended) -> None:
    """Two ranks came to the same result."""
    assert job.code == 0, job.output
    assert len(job.results) == 2, job.output
    assert job.results[0] == job.results[1]
    assert job.results[0].startswith("2: ")


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_trainer_starts_its_ranks(package: str) -> None:
    check(run_script("train.py", package, "smddp"))


def test_fabric_starts_its_ranks() -> None:
    check(run_script("fabric_loop.py", "lightning.fabric", "smddp"))


@pytest.mark.parametrize("strategy", ["smddp_spawn", "smddp_fork"])
def test_other_start_methods(strategy: str) -> None:
    job = run_script("train.py", "lightning.pytorch", strategy)
    assert job.code == 0, job.output
    assert len(job.results) == 1, job.output  # what follows fit() is run by the main process alone


def test_under_sdp_run() -> None:
    through = ("-m", "sdp_plugins.launch", "run", "-n", "2")
    check(run_script("train.py", "lightning.pytorch", "smddp", through=through))


def test_an_object_needs_no_activation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SDP_AUTOLOAD", "0")
    monkeypatch.chdir(tmp_path)
    job = run_script("strategy_object.py")
    assert job.code == 0, job.output
    assert "rank 0 of 1: 4 steps over smddp" in job.output


def check_failure(job: Ended) -> None:
    """The job ended soon, as a failure, and says which rank was lost."""
    assert job.code != 0, job.output
    assert job.seconds_after_failure < 15, job.output  # most of it is the end of Python
    assert not job.results


def test_a_rank_raises() -> None:
    job = run_script("train.py", "lightning.pytorch", "smddp", "1", "step raises")
    check_failure(job)
    assert job.code == 1
    assert "ArithmeticError: a fault of the script" in job.output
    assert "PeerLostError: [rank 0/2] " in job.output
    assert "rank 1 gave up: ArithmeticError: a fault of the script" in job.output


def test_a_rank_is_killed() -> None:
    job = run_script("train.py", "lightning.pytorch", "smddp", "1", "step killed")
    check_failure(job)
    assert job.code == 1
    assert re.search(r"\[rank 0/2\] rank 1 \(pid \d+\) was killed by SIGKILL", job.output)
    assert "PeerLostError: [rank 0/2] " in job.output


def test_the_main_process_raises() -> None:
    job = run_script("train.py", "lightning.pytorch", "smddp", "0", "step raises")
    check_failure(job)
    assert job.code == 1
    assert "rank 0 gave up: ArithmeticError: a fault of the script" in job.output


def test_the_main_process_is_killed() -> None:
    job = run_script("train.py", "lightning.pytorch", "smddp", "0", "step killed")
    check_failure(job)
    assert job.code == -9
    assert "PeerLostError: [rank 1/2] " in job.output


def test_a_spawned_rank_raises() -> None:
    job = run_script("train.py", "lightning.pytorch", "smddp_fork", "1", "step raises")
    check_failure(job)
    assert "ArithmeticError: a fault of the script" in job.output


def test_terminated_between_steps() -> None:
    arguments = ("lightning.pytorch", "smddp", "1", "step waits")
    job = run_script("train.py", *arguments, signals=signal.SIGTERM)
    assert job.code == 0, job.output  # what Lightning's SIGTERMException means
    assert job.seconds_after_failure < 15, job.output
    assert not job.results
    assert "Error" not in job.output


def test_interrupted() -> None:
    arguments = ("lightning.pytorch", "smddp", "1", "step waits")
    job = run_script("train.py", *arguments, signals=signal.SIGINT)
    check_failure(job)
    assert job.code == 1
    assert "PeerLostError: [rank 1/2] " in job.output
    assert "rank 0 gave up: " in job.output


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_of_fabric_raises(rank: str) -> None:
    job = run_script("fabric_loop.py", "lightning.fabric", "smddp", rank)
    check_failure(job)
    assert "ArithmeticError: a fault of the script" in job.output
    assert "PeerLostError: [rank " in job.output


def test_a_rank_fails_before_the_ranks_have_met() -> None:
    job = run_script("train.py", "lightning.pytorch", "smddp", "1", "early raises")
    assert job.code == 1, job.output
    assert job.seconds_after_failure < 15, job.output
    assert "rank 1 (pid " in job.output


def test_the_main_process_is_killed_before_the_ranks_have_met() -> None:
    job = run_script("train.py", "lightning.pytorch", "smddp", "0", "launched killed")
    assert job.code == -9, job.output
    assert job.seconds_after_failure < 15, job.output
