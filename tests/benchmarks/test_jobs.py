"""Jobs of real ranks: commands, failures, and that nothing is left."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from benchmarks import mpi, runner
from benchmarks.job import Job, JobError, JobSpec
from benchmarks.libraries import LibrarySpec, select
from benchmarks.libraries.base import UnsupportedError

HERE = "tests.benchmarks.test_jobs"


class Echo:
    """A task for these tests."""

    def __init__(self, place, fail_at=None, die_at=None):
        self.place = place
        if place.rank == die_at:
            os._exit(7)
        if place.rank == fail_at:
            raise ValueError("no such thing")

    def where(self, factor=1):
        return self.place.rank * factor, self.place.ranks, os.getpid()

    def fail(self, rank):
        if self.place.rank == rank:
            raise ArithmeticError("wrong sum")

    def die(self, rank):
        if self.place.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    def close(self):
        pass


def echo(ranks=2, **arguments):
    return JobSpec("echo", f"{HERE}:Echo", ranks, arguments)


class Broken:
    """A library whose sum is wrong, or that cannot do the dtype, or that ends."""

    reduces = True
    version = "broken 1"

    def __init__(self, place, how):
        self.place, self.how = place, how
        self.array = np.empty(0)

    def allocate(self, count, dtype):
        if self.how == "unsupported":
            raise UnsupportedError("not this")
        self.array = np.zeros(count, dtype)

    def view(self):
        return self.array

    def operation(self, name):
        return self.exit if self.how == "exit" else lambda: None

    def exit(self):
        if self.place.rank == 1:
            os._exit(3)
        time.sleep(600)

    def path(self):
        return "nowhere"

    def close(self):
        pass


def broken(how):
    return LibrarySpec(how, f"{HERE}:Broken", how, options={"how": how})


SMALL = runner.Plan(nbytes=(4096,), rounds=2, round_s=0.01)


def test_commands_reach_all_ranks_and_answers_come_in_rank_order():
    with Job(echo(3)) as job:
        answers = job.call("where", {"factor": 10})
        assert [answer[:2] for answer in answers] == [(0, 3), (10, 3), (20, 3)]
        assert [a[2] for a in job.call("where")] == [a[2] for a in answers]


def test_a_rank_that_raises_is_named():
    with Job(echo()) as job, pytest.raises(JobError, match=r"fail: rank 1: .*wrong sum"):
        job.call("fail", {"rank": 1})


def test_a_rank_that_dies_is_named_and_nobody_waits_for_the_others():
    with Job(echo()) as job, pytest.raises(JobError, match="die: rank 0 ended"):
        job.call("die", {"rank": 0})  # the other one sleeps for longer than a test may take


def test_a_rank_that_is_late_is_named():
    with Job(echo()) as job, pytest.raises(JobError, match="no answer of ranks 0, 1 in 0 s"):
        job.call("die", {"rank": 9}, timeout_s=0.2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"fail_at": 1}, "rank 1: ValueError: no such thing"), ({"die_at": 0}, "rank 0 ended")],
)
def test_a_job_that_does_not_start_says_why(arguments, words):
    with pytest.raises(JobError, match=words):
        Job(echo(**arguments))


def test_why_a_rank_failed_is_told_whoever_else_is_still_to_come(monkeypatch):
    spawn = Job._spawn

    def rank_0_comes_late(job, line, variables):
        late = ["sh", "-c", 'sleep 1; exec "$@"', "sh"]
        spawn(job, line if job._processes else late + line, variables)

    monkeypatch.setattr(Job, "_spawn", rank_0_comes_late)
    with pytest.raises(JobError, match="rank 1: ValueError: no such thing"):
        Job(echo(fail_at=1))


def test_reference_peers_compute_what_they_say():
    report = runner.run(SMALL, select(["lower_bound", "memcpy"]))
    assert report.skipped == {}
    assert [m.variant for m in report.measurements] == ["lower_bound", "memcpy"]
    assert all(len(m.rounds_us) == 2 and min(m.rounds_us) > 0 for m in report.measurements)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_floor_sums_over_any_number_of_ranks_and_sizes(ranks):
    # Every check of a sum is in the ranks: a wrong one would be in report.skipped.
    plan = runner.Plan(
        nbytes=(4, 28, 2**20 + 12), dtypes=("float32", "int64"), ranks=ranks, rounds=1, round_s=0.01
    )
    report = runner.run(plan, select(["lower_bound"]))
    assert report.skipped == {}
    assert [m.case["nbytes"] for m in report.measurements][:3] == [4, 28, 2**20 + 12]
    assert len(report.measurements) == 6


@pytest.mark.parametrize(
    ("how", "words"), [("wrong", "wrong sum: element 0"), ("exit", "rank 1 ended")]
)
def test_a_peer_that_fails_is_left_out_and_the_others_go_on(how, words):
    report = runner.run(SMALL, [broken(how), *select(["memcpy"])])
    assert [m.variant for m in report.measurements] == ["memcpy"]
    assert words in report.skipped[how]


def test_what_a_peer_cannot_do_is_no_failure():
    report = runner.run(SMALL, [broken("unsupported"), *select(["memcpy"])])
    assert [m.variant for m in report.measurements] == ["memcpy"]
    assert report.skipped == {}


def test_without_an_mpi_its_peers_are_skipped():
    report = runner.run(SMALL, select(["mpi", "openmpi"]), mpis=[])
    assert report.measurements == []
    assert report.skipped == {
        "mpi": "needs mpi4py and MPI: none found",
        "openmpi": "needs mpi4py and openmpi: none found",
    }


def test_an_mpi_is_known_by_its_banner(tmp_path, monkeypatch):
    monkeypatch.setattr(mpi.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    for folder in ("bin", "lib"):
        (tmp_path / folder).mkdir()
    program = tmp_path / "bin" / "mpiexec"
    program.write_text("#!/bin/sh\necho 'mpiexec (Open MPI) 5.0.11'\n")
    program.chmod(0o755)
    (tmp_path / "lib" / "libmpi.so.40").touch()
    install = mpi.discover([tmp_path])[0]
    assert (install.flavour, install.mpiexec) == ("openmpi", program)
    assert install.environment()["MPI4PY_LIBMPI"] == str(tmp_path / "lib" / "libmpi.so.40")
    assert install.command([["a", "0"], ["a", "1"]]) == [
        *(str(program), "-n", "1", "a", "0"),
        *(":", "-n", "1", "a", "1"),
    ]
    monkeypatch.setattr(mpi.importlib.util, "find_spec", lambda name: None)
    assert mpi.discover([tmp_path]) == []
