"""Scripts for nodes."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.benchmarks.cluster import PRELUDE, Script


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a program; returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(PRELUDE + textwrap.dedent(text))
        return str(path)

    return write
