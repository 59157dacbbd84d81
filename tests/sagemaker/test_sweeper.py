"""The process that removes a job's folder should the program be killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import sdp_plugins.sagemaker

SWEEPER = Path(sdp_plugins.sagemaker.__file__).with_name("sweeper.py")


def start(folder: Path) -> subprocess.Popen[bytes]:
    (folder / "code").mkdir(parents=True)
    return subprocess.Popen([sys.executable, str(SWEEPER), str(folder)], stdin=subprocess.PIPE)


def test_without_goodbye_the_folder_goes(tmp_path: Path) -> None:
    with start(tmp_path / "job") as sweeper:
        sweeper.communicate(timeout=30)
    assert not (tmp_path / "job").exists()


def test_goodbye_is_enough(tmp_path: Path) -> None:
    """A process that the program has forked meanwhile may hold the pipe open for long."""
    with start(tmp_path / "job") as sweeper:
        assert sweeper.stdin
        try:
            sweeper.stdin.write(b"done\n")
            sweeper.stdin.flush()
            assert sweeper.wait(30) == 0
        finally:
            sweeper.kill()
    assert (tmp_path / "job").exists()
