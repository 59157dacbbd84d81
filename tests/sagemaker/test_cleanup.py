"""The process that removes a job's folder should the program be killed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from sdp_plugins.sagemaker.job_folder import cleanup
from tests.ranks import HANG_S


def start(folder: Path) -> subprocess.Popen[bytes]:
    (folder / "code").mkdir(parents=True)
    return cleanup(folder)


def test_without_goodbye_the_folder_goes(tmp_path: Path) -> None:
    with start(tmp_path / "job") as shell:
        shell.communicate(timeout=HANG_S)
    assert not (tmp_path / "job").exists()


def test_goodbye_is_enough(tmp_path: Path) -> None:
    """A process that the program has forked meanwhile may hold the pipe open for long."""
    with start(tmp_path / "job") as shell:
        assert shell.stdin
        try:
            shell.stdin.write(b"done\n")
            shell.stdin.flush()
            assert shell.wait(HANG_S) == 0
        finally:
            shell.kill()
    assert (tmp_path / "job").exists()
