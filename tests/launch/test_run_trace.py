"""`sdp run --trace`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.launch.jobs import ROOT, Script, launch
from tests.ranks import HANG_S


def test_a_trace_is_left_also_by_a_job_that_fails(script: Script, tmp_path: Path) -> None:
    path = script(
        """
        from sdp_plugins.core import Group
        with Group.from_env() as group:
            group.all_reduce(bytearray(4))
            group.barrier()
        if rank == 1: sys.exit(7)
        """
    )
    folder = tmp_path / "traces"
    done = launch("-n", "2", "--trace", str(folder), path)
    assert done.returncode == 7
    last = done.stderr[done.stderr.rindex("sdp run: ") :]
    assert last.startswith(f"sdp run: {folder}/trace.json: open it in ")
    assert [line.split()[:2] for line in last.splitlines()[2:4]] == [["0", "2"], ["1", "2"]]
    names = [e["name"] for e in json.loads((folder / "trace.json").read_text())["traceEvents"]]
    assert names.count("all_reduce") >= 2 and names.count("barrier") >= 2
    done = launch("-n", "1", "--trace", str(folder), script("sys.exit(0)"))
    assert done.returncode == 0
    assert "there is no trace: " in done.stderr


IMPATIENT = """
import os, signal
from sdp_plugins.launch import cli
from sdp_plugins.trace import merge
def events(*_):
    os.kill(os.getpid(), signal.SIGINT)
    yield {}
merge._events = events
cli.main()
"""


def test_ctrl_c_while_traces_are_merged(script: Script, tmp_path: Path) -> None:
    """The job has ended: its exit code counts, and what its ranks have left stays."""
    path = script(
        """
        from sdp_plugins.core import Group
        with Group.from_env() as group:
            group.barrier()
        sys.exit(7 * (rank == 1))
        """
    )
    folder = tmp_path / "traces"
    line = [sys.executable, "-c", IMPATIENT, "run", "-n", "2", "--trace", str(folder), path]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 7
    command = f"python -m sdp_plugins.trace merge {folder}"
    assert done.stderr.splitlines()[-1] == (
        f"sdp run: interrupted; the ranks' traces are not merged. Hint: {command}"
    )
    assert sorted(os.listdir(folder)) == ["rank-00000.json", "rank-00001.json"]


def test_a_trace_has_no_place(script: Script, tmp_path: Path) -> None:
    """Told before a rank starts, in one line."""
    (tmp_path / "a file").write_text("mine")
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "trace.json").write_text("{}")
    path = script("touch('started')")
    for place, text in {
        tmp_path / "a file": "it is a file",
        Path("/proc/xx"): "No such file or directory",
        tmp_path / "profile": "trace.json there was written by something else",
    }.items():
        done = launch("-n", "2", "--trace", str(place), path)
        assert done.returncode == 2
        assert f"--trace {place}: {text}" in " ".join(done.stderr.split())
        assert "Hint: " in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "started").exists()
    assert (tmp_path / "a file").read_text() == "mine"
