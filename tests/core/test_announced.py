"""Long work says what it is."""

from __future__ import annotations

import time

import pytest

from sdp_plugins.core import announced as module
from sdp_plugins.core.announced import announced
from tests.ranks import HANG_S


def test_what_takes_long_is_announced_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    with announced("merging"):
        end, seen = time.monotonic() + HANG_S, ""
        while not seen and time.monotonic() < end:
            time.sleep(0.01)
            seen = capsys.readouterr().err
    assert seen == "merging ...\n" and capsys.readouterr().err == ""


def test_what_is_quick_is_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", HANG_S)
    with announced("merging"):
        pass
    assert capsys.readouterr().err == ""
