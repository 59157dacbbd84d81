"""Every block of Python in README and docs runs as written.

Whole programs have a name in their first line, and tests of what they show (`launch_page`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.around import ELSEWHERE, FILLED_IN, IN_ONE_PROCESS, IN_TWO_RANKS
from tests.docs.pages import ROOT, Block, blocks
from tests.launch.jobs import LAUNCHER

LIMIT_S = 300  # for one; each takes 5 to 15 s on a quiet machine
PYTHON = [block for block in blocks() if block.language == "python"]
DONE = """
import os, pathlib
pathlib.Path(f"done {os.getpid()}").touch()
"""
PARTS = IN_TWO_RANKS | IN_ONE_PROCESS
pytestmark = pytest.mark.timeout(LIMIT_S + 20)


def names(block: Block) -> list[str]:
    """What tells who runs a part of a program."""
    return [name for name in (*PARTS, *ELSEWHERE) if name in block.text]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_program_runs(name: str, tmp_path: Path) -> None:
    found = [block for block in PYTHON if names(block) == [name]]
    assert len(found) == 1, "say in around.py what stands before and after it"
    text = "\n" + found[0].text
    for gap, filling in FILLED_IN.items():
        text = text.replace(gap, filling)
    before, after = PARTS[name]
    (tmp_path / "train.py").write_text(before + text + after + DONE)
    ranks = 2 if name in IN_TWO_RANKS else 4
    line = [*LAUNCHER, "-n", "2"] if name in IN_TWO_RANKS else [sys.executable]
    done = subprocess.run(
        [*line, "train.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "SDP_TIMEOUT_S": "100"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("done *"))) == ranks, done.stdout


def test_every_block_is_run_by_a_test() -> None:
    tests = "".join(
        path.read_text() for path in ROOT.glob("tests/**/test_*.py") if path != Path(__file__)
    )
    for block in PYTHON:
        if block.program is None:
            assert len(names(block)) == 1, block
            continue
        page = block.page.removeprefix("docs/")
        calls = re.findall(rf'launch_page\(\s*"{page}".*?\)\n', tests, re.DOTALL)
        calls = [call for call in calls if ".py" in call or block.program == "train.py"]
        assert any(block.program in call or ".py" not in call for call in calls), block
    assert all((ROOT / path).exists() for path in ELSEWHERE.values())
