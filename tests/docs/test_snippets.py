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


def program(name: str) -> str:
    """A part of a program, with what stands around it."""
    found = [block for block in PYTHON if names(block) == [name]]
    assert len(found) == 1, "say in around.py what stands before and after it"
    text = "\n" + found[0].text
    for gap, filling in FILLED_IN.items():
        text = text.replace(gap, filling)
    before, after = PARTS[name]
    return before + text + after


@pytest.mark.parametrize("name", IN_TWO_RANKS)
def test_parts_that_sdp_run_starts(name: str, tmp_path: Path) -> None:
    run(program(name), [*LAUNCHER, "-n", "2"], 2, tmp_path)


def test_parts_that_start_ranks_themselves(tmp_path: Path) -> None:
    run("\n".join(map(program, IN_ONE_PROCESS)), [sys.executable], 4, tmp_path)


def run(text: str, line: list[str], ranks: int, folder: Path) -> None:
    (folder / "train.py").write_text(text + DONE)
    done = subprocess.run(
        [*line, "train.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "SDP_TIMEOUT_S": "100"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("done *"))) == ranks, done.stdout


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
