"""Scripts and data for jobs on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sagemaker.jobs import SHOW


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "show.py").write_text(SHOW)
    (folder / "run.sh").write_text('#!/bin/sh\nexec "$PYTHON" show.py "$@"\n')
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "numbers").write_text("1 2 3")
    return folder
