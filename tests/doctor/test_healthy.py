"""No false alarm where all is well, and no check that cannot be run."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest

from sdp_plugins.doctor import across_hosts, all_checks, speed
from sdp_plugins.doctor.finding import Finding, Status
from sdp_plugins.flight.segments import Segments
from tests.doctor.machines import healthy, importing

ROOT = Path(__file__).parents[2]


def examined(folder: Path, **imported: object) -> list[Finding]:
    machine = importing(healthy(folder), **imported)
    with mock.patch("sdp_plugins.flight.segments.read_segments", return_value=Segments([], 0)):
        return list(all_checks.run_checks(machine))


def test_a_healthy_machine_gives_no_alarm(tmp_path: Path) -> None:
    found = examined(tmp_path)
    assert [finding for finding in found if finding.is_problem] == []
    assert not any("the check failed itself" in finding.text for finding in found)


def test_every_check_finds_something_and_says_it_in_one_sentence(tmp_path: Path) -> None:
    found = examined(tmp_path)
    assert {finding.check for finding in found} == {*all_checks.NAMES}
    assert len(all_checks.NAMES) == len({*all_checks.NAMES}) >= 25
    assert all(finding.text and not finding.text.endswith(".") for finding in found)


def test_a_check_that_fails_itself_does_not_end_the_others(tmp_path: Path) -> None:
    found = examined(tmp_path, native="not what the check expects", owners=0)
    broken = {f.check for f in found if "the check failed itself" in f.text}
    assert "native-module" in broken
    assert all(f.status is Status.skipped for f in found if f.check in broken)
    assert len({finding.check for finding in found}) == len(all_checks.NAMES)


def test_the_page_lists_every_check() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    listed = re.findall(r"^\| `([a-z][a-z0-9-]+)` \|", page, re.MULTILINE)
    assert listed == [*all_checks.NAMES, *speed.NAMES, *across_hosts.NAMES]


@pytest.mark.parametrize("subject", all_checks.SUBJECTS)
def test_the_page_has_a_section_for_every_subject(subject: str) -> None:
    assert f"\n### {subject}\n" in (ROOT / "docs" / "doctor.md").read_text()
