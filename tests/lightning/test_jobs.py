"""Scripts that import only Lightning and start their own ranks, or are started as ranks."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lightning import cases
from tests.lightning.jobs import END_S, Ended, Job, run_jobs
from tests.ranks import HANG_S

pytestmark = pytest.mark.timeout(1200)
LIGHTNING = ("train.py", "lightning.pytorch", "smddp")
FABRIC = ("fabric_loop.py", "lightning.fabric", "smddp")
SDP_RUN = ("-m", "sdp_plugins.launch", "run", "-n", "2")


def check(job: Ended) -> None:
    """Two ranks came to the same result."""
    assert job.code == 0, job.output
    assert len(job.results) == 2, job.output
    assert job.results[0] == job.results[1]
    assert job.results[0].startswith("2: ")


def test_scripts_start_their_ranks_or_are_started() -> None:
    launched = Job("train.py", "pytorch_lightning", "smddp", through=SDP_RUN)
    for job in run_jobs(Job(*LIGHTNING), Job(*FABRIC), launched):
        check(job)


def test_an_object_needs_no_activation() -> None:
    job = Job("strategy_object.py", environment={"SDP_AUTOLOAD": "0"}).run()
    assert job.code == 0, job.output
    assert "rank 0 of 1: 4 steps over smddp" in job.output


def check_failure(job: Ended) -> None:
    """The job ended soon, as a failure, and says which rank was lost."""
    assert job.code != 0, job.output
    assert job.seconds_after_failure < END_S, job.output
    assert not job.results


def test_other_start_methods() -> None:
    both = Job("train.py", "lightning.pytorch", "smddp_fork,smddp_spawn").run()
    assert both.code == 0, both.output
    # What follows fit() is run by the main process alone.
    assert len(both.results) == 2, both.output
    assert both.results[0] == both.results[1]


def test_a_notebook_computes_before_it_forks_ranks() -> None:
    job = Job("forks_again.py", environment={"OMP_NUM_THREADS": "2"}).run()
    assert job.code == 0, job.output
    assert job.results == ["2: 2", "2: 2"]  # threads of each


def test_an_interrupt_of_the_notebook_alone_ends_its_ranks(tmp_path: Path) -> None:
    script = Path(__file__).with_name("scripts") / "forks_interrupted.py"
    line = [sys.executable, str(script)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert "left: []" in done.stdout, done.stdout + done.stderr


@pytest.mark.long
def test_a_forked_rank_raises() -> None:
    failing = Job("train.py", "lightning.pytorch", "smddp_fork", "1", "step raises").run()
    check_failure(failing)
    assert "ArithmeticError: a fault of the script" in failing.output


def test_a_rank_raises() -> None:
    job = Job(*LIGHTNING, "1", "step raises").run()
    check_failure(job)
    assert job.code == 1
    assert "ArithmeticError: a fault of the script" in job.output
    assert "PeerLostError: [rank 0/2] " in job.output
    assert "rank 1 gave up: ArithmeticError: a fault of the script" in job.output


def test_a_rank_is_killed() -> None:
    job, main = run_jobs(Job(*LIGHTNING, "1", "step killed"), Job(*LIGHTNING, "0", "step killed"))
    check_failure(job)
    assert job.code == 1
    assert re.search(r"\[rank 0/2\] rank 1 \(pid \d+\) was killed by SIGKILL", job.output)
    assert "PeerLostError: [rank 0/2] " in job.output
    check_failure(main)
    assert main.code == -9
    assert "PeerLostError: [rank 1/2] " in main.output


def test_signals_to_the_main_process() -> None:
    terminated, interrupted = run_jobs(
        Job(*LIGHTNING, "1", "step waits", signals=signal.SIGTERM),
        Job(*LIGHTNING, "1", "step waits", signals=signal.SIGINT),
    )
    assert terminated.code == 0, terminated.output  # what Lightning's SIGTERMException means
    assert terminated.seconds_after_failure < END_S, terminated.output
    assert not terminated.results
    assert "Error" not in terminated.output
    check_failure(interrupted)
    assert interrupted.code == 1
    assert "PeerLostError: [rank 1/2] " in interrupted.output
    assert "rank 0 gave up: " in interrupted.output


@pytest.mark.parametrize(
    ("rank", "through"),
    [("1", ()), pytest.param("0", SDP_RUN, marks=pytest.mark.long)],
    ids=["Lightning starts them", "sdp run"],
)
def test_one_rank_alone_gets_sigterm(rank: str, through: tuple[str, ...]) -> None:
    failed = Job(*LIGHTNING, rank, "step terminated", through=through).run()
    check_failure(failed)
    assert f"rank {rank} gave up: it received SIGTERM" in failed.output
    assert "fewer operations" not in failed.output


def test_the_main_process_of_fabric_raises() -> None:
    job = Job(*FABRIC, "0").run()
    check_failure(job)
    assert "ArithmeticError: a fault of the script" in job.output
    assert "PeerLostError: [rank " in job.output


def test_an_exit_with_a_code_is_a_failure(rank_pool: Any) -> None:
    assert "rank 1 gave up: SystemExit: 5" in rank_pool(2).run(cases.leave, 5)[0]
    assert "rank 1 has closed the group" in rank_pool(2).run(cases.leave, 0)[0]


def test_a_rank_fails_before_the_ranks_have_met() -> None:
    job = Job(*LIGHTNING, "1", "early raises").run()
    check_failure(job)
    assert job.code == 1, job.output
    assert "rank 1 (pid " in job.output


@pytest.mark.long
def test_the_main_process_is_killed_before_the_ranks_have_met() -> None:
    main = Job(*LIGHTNING, "0", "launched killed").run()
    check_failure(main)
    assert main.code == -9, main.output
