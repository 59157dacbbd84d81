"""The program in docs/keras.md runs as it is written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.ranks import HANG_S

DOCS = Path(__file__).parents[2] / "docs" / "keras.md"


def test_the_first_program_runs_as_written(tmp_path: Path) -> None:
    (found,) = re.findall(r"```python\n(# train\.py\n.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(found)
    command = [sys.executable, "-m", "sdp_plugins.launch", "run", "-n", "2", "train.py"]
    environment = os.environ | {"KERAS_BACKEND": "jax", "SDP_TIMEOUT_S": "60"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Epoch 5/5") == 1
    assert (tmp_path / "digits.keras").stat().st_size > 10_000
