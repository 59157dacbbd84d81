"""`sdp run --elastic`: jobs that lose ranks, and get others."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.launch.jobs import Script, launch, launch_page, read_pids, start
from tests.processes import wait_until_gone
from tests.ranks import HANG_S

# Counts to 200 by 4 ranks, and tells who has taken part; a rank that was lost comes back once.
COUNTING = """
import numpy as np
from sdp_plugins.core import ElasticJob, SdpError
at, victims, everyone = float(sys.argv[1]), sys.argv[2].split(","), int(os.environ["WORLD_SIZE"])
new = "SDP_JOIN" not in os.environ
with ElasticJob.from_env(timeout_s=60) as job:
    done, complete = 0, False
    while not complete:
        try:
            told = np.array([done, job.waiting()])
            job.group.all_reduce(told, "max")
            done = int(told[0]) + 1
            if told[1]:
                job.regroup()
                continue
            if done == at and str(rank) in victims and new:
                how(job)
            complete = done >= 20 and job.group.world_size == everyone
            time.sleep(0.01)
        except SdpError:
            job.regroup()
    print("done with", job.group.world_size, flush=True)
    job.group.barrier()
"""
KILLED = "def how(job): os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.mark.parametrize("victims", ["0", "2", "1,3"])
def test_lost_ranks_are_replaced(script: Script, victims: str) -> None:
    done = launch("--elastic", "2:4", script(KILLED + COUNTING), "7", victims)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {n}] done with 4" for n in range(4)]
    for victim in victims.split(","):
        ended = (
            rf"sdp run: rank {victim} \(pid \d+\) has ended: killed by SIGKILL; starting another"
        )
        assert re.search(rf"{ended} \([12] of 10\)", done.stderr)
        assert f"sdp run: rank {victim} takes part again, after " in done.stderr


def test_the_others_go_on_when_no_more_are_started(script: Script) -> None:
    text = (KILLED + COUNTING).replace("world_size == everyone", "world_size == everyone - 1")
    done = launch("--elastic", "2:4", "--max-restarts", "0", script(text), "7", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {n}] done with 3" for n in (0, 1, 3)]
    assert re.search(r"rank 2 \(pid \d+\) has ended: killed by SIGKILL; the others", done.stderr)
    assert "sdp run: the job goes on with 3 ranks" in done.stderr


WITHOUT_A_GRACE = """
import runpy
from sdp_plugins.launch import supervise
supervise.SURVIVOR_GRACE_S = supervise.CAUSE_GRACE_S = 1e6  # for ranks that end by themselves
runpy.run_module("sdp_plugins.launch", run_name="__main__")
"""


def test_too_few_are_left(script: Script) -> None:
    """The others would train on, and are ended at once."""
    text = "def how(job): raise ValueError('the reason')\n" + COUNTING
    options = "--elastic", "3:3", "--max-restarts", "0"
    launcher = [sys.executable, "-c", WITHOUT_A_GRACE, "run"]
    done = launch(*options, script(text), "7", "1", launcher=launcher)
    assert done.returncode == 1
    assert "has ended: exit code 1; fewer than 3 ranks are left" in done.stderr
    last = done.stderr.rpartition("sdp run: rank 1 ")[2]
    assert "failed first: exit code 1" in last
    assert last.rstrip().endswith("ValueError: the reason")


def test_a_stopped_rank_is_ended_and_replaced(script: Script) -> None:
    text = "def how(job): os.kill(os.getpid(), signal.SIGSTOP)\n" + COUNTING
    text = text.replace("    done, complete", "    job.group.timeout_s = 5\n    done, complete")
    done = launch("--elastic", "2:3", script(text), "7", "1")
    assert done.returncode == 0, done.stderr
    assert "sdp run: rank 1 has been left out by the others; ending it" in done.stderr
    assert "sdp run: rank 1 takes part again" in done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {n}] done with 3" for n in range(3)]


def test_an_error_before_the_job_has_begun_ends_it(script: Script) -> None:
    done = launch(
        "--elastic", "1:3", script("if rank == 1: raise OSError('the reason')\n" + COUNTING)
    )
    assert done.returncode == 1
    assert "starting another" not in done.stderr
    assert done.stderr.rstrip().endswith("OSError: the reason")


def test_an_error_of_all_ranks_ends_the_job(script: Script) -> None:
    text = "def how(job): raise ValueError('the reason')\n" + COUNTING
    done = launch("--elastic", "1:3", script(text), "7", "0,1,2")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: the reason")


def test_an_error_of_the_last_rank_fails_the_job(script: Script) -> None:
    """The others have ended; what it was to write is missing."""
    text = """
    from sdp_plugins.core import ElasticJob
    with ElasticJob.from_env(timeout_s=60) as job:
        job.group.barrier()
    if rank == 0:
        while job.group.ended() != [1]:
            time.sleep(0.01)
        time.sleep(1)  # until the launcher has noticed
        raise OSError("no space left")
    """
    done = launch("--elastic", "1:2", script(text))
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("OSError: no space left")


def test_the_last_rank_with_the_state_is_lost(script: Script) -> None:
    """The report names the process that the job has ended with, not the one lost before it."""
    text = "            if job.group.world_size == 1: how(job)\n            complete ="
    text = (KILLED + COUNTING).replace("            complete =", text)
    done = launch("--elastic", "1:2", script(text), "7", "1")
    assert done.returncode == 128 + signal.SIGKILL
    found = re.findall(r"rank (\d) \((pid \d+)\) (has ended|failed first): killed", done.stderr)
    assert [(rank, how) for rank, _, how in found] == [
        ("1", "has ended"),
        ("0", "has ended"),
        ("0", "failed first"),
    ]
    assert found[1][1] == found[2][1] != found[0][1]
    assert "no rank is left that has the job's state. Hint: start the job again" in done.stderr


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job(script: Script, number: signal.Signals, lost: bool) -> None:
    """Its exit code is the signal's, also if a rank has been lost before."""
    text = """
    from sdp_plugins.core import ElasticJob
    print(os.getpid(), flush=True)
    with ElasticJob.from_env() as job:
        if rank == 1 and "lost" in sys.argv:
            time.sleep(5)  # until the launcher has noticed that the job has begun
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """
    job = start("--elastic", "1:3", "--no-prefix", script(text), *["lost"] * lost)
    pids = read_pids(job, 3 + lost)
    job.send_signal(number)
    _, errors = job.communicate(timeout=HANG_S)
    assert job.returncode == 128 + number
    assert ("starting another" in errors) == lost
    wait_until_gone(pids)


def test_the_program_of_the_page_runs_as_written(tmp_path: Path) -> None:
    done = launch_page("elastic.md", tmp_path, ("--elastic", "1:2"), "count.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {n}] 1000 by 2 ranks" for n in (0, 1)]


def test_the_training_of_the_page_runs_as_written(tmp_path: Path) -> None:
    done = launch_page("elastic.md", tmp_path, options=("--elastic", "1:2"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": 2 ranks, 145 steps") == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--elastic", "3"], "--elastic takes MIN:MAX, such as 2:4, with 1 <= MIN <= MAX, not '3'"),
        (["--elastic", "3:2"], "--elastic takes MIN:MAX"),
        (["--elastic", "0:2"], "--elastic takes MIN:MAX"),
        (["--elastic", "1:2", "-n", "2"], "Hint: leave out -n"),
        (["--elastic", "1:2", "--hosts", "a,b", "--mpirun", "m"], "Hint: leave out --mpirun"),
        (["--elastic", "1:2", "--hosts", "a,b", "-n", "2"], "Hint: leave out -n"),
    ],
)
def test_mistakes_are_told(script: Script, options: list[str], text: str) -> None:
    done = launch(*options, script("raise SystemExit(9)"))
    assert done.returncode == 2
    assert text in done.stderr


def test_a_job_over_mpi_is_refused(script: Script) -> None:
    line = ["--elastic", "1:2", "--hosts", "localhost:2", "-x", "SDP_INTERNODE=mpi"]
    done = launch(*line, script("raise SystemExit(9)"))
    assert done.returncode == 1
    assert done.stderr == (
        "sdp run: SDP_INTERNODE=mpi: MPI ends a job that loses a rank, so --elastic uses gloo. "
        "Hint: unset SDP_INTERNODE.\n"
    )


def test_ranks_on_this_machine_as_a_host(script: Script) -> None:
    line = ["--elastic", "2:4", "--hosts", "localhost:4"]
    done = launch(*line, script(KILLED + COUNTING), "15", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {n}] done with 4" for n in range(4)]
    assert "sdp run: rank 2 takes part again, after " in done.stderr
