"""The program in docs/keras.md runs as it is written."""

from __future__ import annotations

import os
from pathlib import Path

from tests.launch.jobs import launch_page


def test_the_first_program_runs_as_written(tmp_path: Path) -> None:
    environment = os.environ | {"KERAS_BACKEND": "jax", "SDP_TIMEOUT_S": "60"}
    done = launch_page("keras.md", tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Epoch 5/5") == 1
    assert (tmp_path / "digits.keras").stat().st_size > 10_000
