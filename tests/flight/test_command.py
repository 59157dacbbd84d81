"""`python -m sdp_plugins.flight`: which job is meant, what is shown, and what is written."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from sdp_plugins.core import CollectiveTimeoutError, Group
from sdp_plugins.flight.cli import main
from sdp_plugins.flight.segments import Segments
from sdp_plugins.trace.trace_file import about
from tests.faults import gave_up, stay_away
from tests.flight.cases import one_is_late, queue_many, until_seen
from tests.ranks import HANG_S, Start, run_ranks, say, start_ranks
from tests.trace.chrome_schema import check

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process: exit code, stdout, stderr."""

    def command(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return command


def test_a_job_by_its_key_and_by_its_processes(start_pooled: Start, run: Run) -> None:
    with start_pooled(3, one_is_late, "absent") as ranks:
        text = until_seen(ranks, "for rank 2", r"rank 2 \(pid ")
        key = ranks.environment["SDP_JOB_ID"]
        for word in (key, f"id:{key}", key[:12], ranks[1].pid):
            code, out, _ = run(word)
            assert code == 0 and f"job id:{key} on " in out
            assert "ranks 0-2 of `" in out and "`, 1 group, pids " in out
            assert text.splitlines()[0] in out and "sum for rank 2\n" in out


def test_of_two_jobs_one_has_to_be_named(start_pooled: Start, run: Run, tmp_path: Path) -> None:
    with start_pooled(2, queue_many) as ranks, start_pooled(3, one_is_late, "absent") as others:
        until_seen(ranks, "for rank 1")
        until_seen(others, "for rank 2")
        code, out, error = run()
        assert (code, out) == (1, "") and " jobs here; name one of\n" in error
        for job in ranks, others:
            # Processes that are kept between tests have had other keys before.
            assert f" id:{job.environment['SDP_JOB_ID']} " in error
            run(job.environment["SDP_JOB_ID"], "--json", tmp_path / f"{len(job)}.json")
        code, _, error = run(tmp_path / "2.json", tmp_path / "3.json")
        assert code == 1 and "there are 2 jobs in these reports" in error


def test_where_there_is_no_job(capsys: pytest.CaptureFixture[str]) -> None:
    for found, text in (
        (Segments([], 0), "no job of this user"),
        (Segments([], 2), "another version"),
    ):
        with mock.patch("sdp_plugins.flight.choice.read_segments", return_value=found):
            assert main([]) == 1
        assert text in capsys.readouterr().err


def test_a_word_that_means_no_job(start_pooled: Start, run: Run) -> None:
    with start_pooled(2, queue_many) as ranks:
        until_seen(ranks, "for rank 1")
        code, out, error = run("nonsense")
        assert (code, out) == (1, "")
        assert error.startswith("flight: no such job; there are\n")
        assert f" id:{ranks.environment['SDP_JOB_ID']} " in error  # others may run here, too
        code, _, error = run("nonsense", "twice")
        assert code == 1 and "there is no file nonsense" in error


def test_the_last_operations_of_each_rank(start_pooled: Start, run: Run) -> None:
    with start_pooled(2, queue_many) as ranks:
        until_seen(ranks, "for rank 1")
        _, out, _ = run(ranks.environment["SDP_JOB_ID"], "--last", 2)
        rows = [line.split() for line in out.partition("\nrank  group")[2].splitlines()[1:]]
        table = [row for row in rows if row[1] == "flown"]  # a pool's ranks may keep others
        assert [row[0] for row in table] == ["0"] * 2
        assert table[0][-5:] == ["queued", "all_reduce", "#2", "float64[10]", "sum"]


def test_a_timeline(start_pooled: Start, run: Run, tmp_path: Path) -> None:
    with start_pooled(3, one_is_late, "absent") as ranks:
        until_seen(ranks, "ranks 0, 1 have waited")
        run(ranks.environment["SDP_JOB_ID"], "--chrome", tmp_path / "trace.json")
        assert about(tmp_path / "trace.json") is None  # else `sdp run --trace` replaced it
    found = json.loads((tmp_path / "trace.json").read_text())
    check(found)
    slices = [e for e in found["traceEvents"] if e.get("cat") == "collective"]
    assert {(e["pid"], e["name"], e["args"]["seq"]) for e in slices} == {
        *((rank, "broadcast", 1) for rank in range(3)),
        *((rank, "all_reduce", 2) for rank in range(2)),
    }
    open_ones = [e for e in slices if e["name"] == "all_reduce"]
    assert all(e["args"]["unfinished"] and e["args"]["thread"] == "main" for e in open_ones)
    assert all(e["dur"] > 0 for e in open_ones)
    assert abs(open_ones[0]["ts"] / 1e6 - time.time()) < 60


def test_a_report_is_read_again(start_pooled: Start, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with start_pooled(3, one_is_late, "absent") as ranks:
        until_seen(ranks, "for rank 2")
        _, live, _ = run(ranks.environment["SDP_JOB_ID"], "--json", path)
    code, read, _ = run(path)
    assert (code, read) == (0, re.sub(" of `.*`", "", live))  # nobody runs any more


def test_a_reader_that_leaves(start_pooled: Start, tmp_path: Path) -> None:
    """As `| head` does: what is to be written is written, and nothing is said."""
    path = tmp_path / "a.json"
    with start_pooled(3, one_is_late, "absent") as ranks:
        until_seen(ranks, "for rank 2")
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "sdp_plugins.flight", ranks.environment["SDP_JOB_ID"]]
        try:
            done = subprocess.run(
                [*command, "--json", path],
                stdout=writer,
                stderr=subprocess.PIPE,
                check=False,
                timeout=HANG_S,
            )
        finally:
            os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
    assert json.loads(path.read_text())


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "[" * 100_000, '{"format": "sdp_plugins flight 1"']
)
def test_files_that_are_no_reports(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    code, out, error = run(path)
    assert (code, out) == (1, "") and error.startswith(f"flight: {path}: ")
    code, _, error = run(tmp_path)
    assert code == 1 and "no report" in error


# ---- what failed jobs leave ---------------------------------------------------------------------


def time_out(rank: int, world: int) -> None:
    with Group.from_env(name="flown", timeout_s=30) as group:
        group.broadcast(np.ones(4), 0)
        group.timeout_s = 1  # not for the rendezvous, which a busy machine may delay
        if rank == 2:
            stay_away(2, world)
            return
        with pytest.raises(CollectiveTimeoutError) as caught:
            group.all_reduce(np.ones(4))
        gave_up()
        say("\n".join(getattr(caught.value, "__notes__", [])))


def test_a_failed_group_leaves_a_report(run: Run, tmp_path: Path) -> None:
    with start_ranks(3, time_out, env={"SDP_FLIGHT_DIR": str(tmp_path / "flight")}) as ranks:
        notes = [ranks[rank].heard() for rank in (0, 1)]
        ranks.results()
    left = sorted(path.name for path in (tmp_path / "flight").iterdir())
    assert [name[:11] for name in left] == ["rank-00000.", "rank-00001."]
    assert all(name.endswith(".flight.json") for name in left)
    hint = f"All groups: python -m sdp_plugins.flight {tmp_path}/flight"
    assert all(note.endswith(hint) or not note for note in notes)
    code, out, _ = run(tmp_path / "flight")
    assert code == 0
    assert (
        "ranks 0, 1 have waited 1." in out and "in all_reduce #2 float64[4] sum for rank 2" in out
    )
    last = r"is in no operation; its last: broadcast #1 float64\[4\] root 0, done [\d.]+ m?s ago"
    assert re.search(last, out)
    assert "failed on rank" in out and "rank 2 did not arrive in 1 s" in out


def test_a_folder_that_cannot_be_made_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run_ranks(3, time_out, env={"SDP_FLIGHT_DIR": str(tmp_path / "file" / "flight")})


# ---- the launcher -------------------------------------------------------------------------------

SCRIPT = """
import sys, time, numpy
from sdp_plugins.core import Group
with Group.from_env(name="flown") as group:
    group.barrier()
    print("going", flush=True)
    if group.rank == 1:
        time.sleep(60)
    group.all_reduce(numpy.ones(10))
"""


@contextmanager
def launched(script: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    (folder / "script.py").write_text(script)
    line = [sys.executable, "-m", "sdp_plugins.launch", "run", "-n", "2", "--no-status"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*line, str(folder / "script.py")], stdout=pipe, stderr=pipe, text=True
    ) as job:
        try:
            yield job
        finally:
            job.terminate()
            job.communicate(timeout=HANG_S)


def lines_of(job: subprocess.Popen[str], count: int) -> str:
    assert job.stderr is not None
    return "".join(job.stderr.readline() for _ in range(count))


def test_a_launcher_is_asked(tmp_path: Path, run: Run) -> None:
    with launched(SCRIPT, tmp_path) as job:
        assert job.stdout is not None
        assert "going" in job.stdout.readline() + job.stdout.readline()
        end = time.monotonic() + HANG_S
        while "for rank 1" not in run(job.pid)[1] and time.monotonic() < end:
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        text = lines_of(job, 5)
        assert "sdp run: the ranks on this machine at the moment:\njob id:" in text
        assert "rank 0 has waited" in text and "float64[10] sum for rank 1\n" in text
        assert job.poll() is None


def test_a_launcher_is_asked_before_there_are_groups(tmp_path: Path) -> None:
    with launched("print('going', flush=True); import time; time.sleep(60)", tmp_path) as job:
        assert job.stdout is not None
        assert "going" in job.stdout.readline() + job.stdout.readline()
        os.kill(job.pid, signal.SIGUSR1)
        assert "no rank on this machine has an open group" in lines_of(job, 1)
        assert job.poll() is None
