"""The programs in the documentation run as written, and its links lead somewhere."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from sdp_plugins.core.config import VARIABLES
from tests.launch.jobs import launch_page

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for path, anchor in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}")
    assert not broken


def test_the_program_without_a_framework_prints_what_its_page_shows(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "core.md").read_text()
    (shown,) = re.findall(r"```\n\$ sdp run -n 2 train\.py\n(.*?)```", page, re.DOTALL)
    done = launch_page("core.md", tmp_path, env=os.environ | {"SDP_TIMEOUT_S": "60"})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(shown.splitlines())


def test_the_page_of_variables_has_all_of_them() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    described = re.findall(r"^\| `(SDP_\w+)` \|", page, re.MULTILINE)
    assert sorted(described) == sorted(VARIABLES)
