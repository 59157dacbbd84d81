"""The documentation's figures show what its tables say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from benchmarks.figures import DOCS, FIGURES, draw


def words(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


@pytest.mark.may_leak("fds", reason="matplotlib keeps its font files open")
def test_the_figures_are_those_of_the_tables(tmp_path: Path) -> None:
    draw(tmp_path)
    for make in FIGURES:
        name = f"{make.__name__}.svg"
        shown = words(DOCS / "images" / name)
        assert len(shown) > 5
        assert shown == words(tmp_path / name), "run: python -m benchmarks figures docs/images"
