"""The process that removes a job's folder should the program be killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import sdp_plugins.sagemaker
from tests.ranks import HANG_S

CLEANUP = Path(sdp_plugins.sagemaker.__file__).with_name("cleanup.py")


def start(folder: Path) -> subprocess.Popen[bytes]:
    (folder / "code").mkdir(parents=True)
    return subprocess.Popen([sys.executable, str(CLEANUP), str(folder)], stdin=subprocess.PIPE)


def test_without_goodbye_the_folder_goes(tmp_path: Path) -> None:
    with start(tmp_path / "job") as cleanup:
        cleanup.communicate(timeout=HANG_S)
    assert not (tmp_path / "job").exists()


def test_goodbye_is_enough(tmp_path: Path) -> None:
    """A process that the program has forked meanwhile may hold the pipe open for long."""
    with start(tmp_path / "job") as cleanup:
        assert cleanup.stdin
        try:
            cleanup.stdin.write(b"done\n")
            cleanup.stdin.flush()
            assert cleanup.wait(HANG_S) == 0
        finally:
            cleanup.kill()
    assert (tmp_path / "job").exists()
