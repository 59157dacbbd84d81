"""Scripts for jobs."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.launch.jobs import HEADER, Script


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a script; those of several jobs, which have files of their own, into folders."""

    def write(text: str, folder: str = ".") -> str:
        path = tmp_path / folder / "a script.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(HEADER + textwrap.dedent(text))
        return str(path)

    return write
