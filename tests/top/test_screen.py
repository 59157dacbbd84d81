"""What fits on the screen of `sdp top`."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console, Group

from sdp_plugins.top.screen import lines_on
from sdp_plugins.top.view import HEADINGS, GroupView, JobView, RankRow

NOTE = "page: http://127.0.0.1:40375/4uT3abcdefghijklmnopqrstuvwxyz0123456789ABCDEFkQ/"
ROW = RankRow(0, ("0",) * len(HEADINGS), False, False)


def shown(width: int, height: int, groups: int, idle: str = "") -> list[str]:
    """The lines that a terminal shows."""
    views = [GroupView(f"group g{number}", [ROW] * 2) for number in range(groups)]
    console = Console(file=StringIO(), width=width, height=height)
    console.print(Group(*lines_on(console, JobView("job x " * 50, views, idle), [NOTE])))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 60, 100])
@pytest.mark.parametrize("groups", [1, 31])
def test_a_note_is_never_cut(width: int, groups: int) -> None:
    lines = shown(width, 24, groups)
    assert len(lines) <= 24 and max(map(len, lines)) <= width
    assert NOTE.removeprefix("page: ") in "".join(lines).replace(" ", "")
    assert lines.index("q leaves") < lines.index("group g0")


def test_groups_that_do_not_fit_are_counted() -> None:
    lines = shown(100, 24, 31, "also open, and idle: h")
    titles = [line for line in lines if line.startswith("group ")]
    assert titles == ["group g0", "group g1", "group g2"]
    assert lines[-2:] == ["28 more groups", "also open, and idle: h"]
    assert len(lines) <= 24
    assert not any("more groups" in line for line in shown(100, 24, 3))
