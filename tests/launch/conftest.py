"""Scripts for jobs, and the MPIs that start them."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.launch.jobs import HEADER, Script
from tests.nodes import MPIS


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes scripts; those of several jobs, which have files of their own, into folders."""
    written: list[Path] = []

    def write(text: str, folder: str = ".") -> str:
        path = tmp_path / folder / f"a script {len(written)}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(HEADER + textwrap.dedent(text))
        written.append(path)
        return str(path)

    return write


@pytest.fixture(params=MPIS)
def mpi(request: pytest.FixtureRequest) -> str:
    """An MPI's prefix."""
    prefix = MPIS[request.param]
    if not prefix:
        pytest.skip(f"no variable names an {request.param}")
    return prefix
