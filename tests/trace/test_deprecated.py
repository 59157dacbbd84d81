"""Names that end with the next release work, and say what has replaced them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from sdp_plugins import trace
from sdp_plugins.trace import trace_file


def run(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


def test_the_module() -> None:
    with pytest.warns(DeprecationWarning, match="import sdp_plugins.trace"):
        old = importlib.import_module("sdp_plugins.core.trace")
    assert all(getattr(old, name) is getattr(trace, name) for name in trace.__all__)


def test_the_flight_recorder_s_command(tmp_path: Path) -> None:
    done = run("sdp_plugins.trace", str(tmp_path))
    deprecated, error = done.stderr.splitlines()
    assert "use python -m sdp_plugins.flight" in deprecated
    assert error.startswith("flight: there is no report") and done.returncode == 1


def test_the_command_that_merged(tmp_path: Path) -> None:
    trace_file.write(tmp_path / "rank-00000.json", {"rank": 0}, [])
    old = run("sdp_plugins.launch.merge_trace", str(tmp_path))
    new = run("sdp_plugins.trace", "merge", str(tmp_path))
    deprecated, *errors = old.stderr.splitlines()
    assert "use python -m sdp_plugins.trace merge" in deprecated
    assert (errors, old.returncode) == (new.stderr.splitlines(), 1)
    assert "is not the trace of a rank" in errors[0]
