"""The first script that a reader runs."""

from __future__ import annotations

import re

from tests.launch.jobs import ROOT, launch


def test_digits_are_learnt() -> None:
    done = launch("--no-prefix", "-n", "2", str(ROOT / "examples" / "digits_torch.py"))
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(
        r"2 ranks over smddp: ([\d.]+)% of 360 digits, [\d,]+ images/s in training\n", done.stdout
    )
    assert found is not None and float(found[1]) > 85, done.stdout  # chance is 10
