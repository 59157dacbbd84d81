"""The private names of torch: a version that moves one is refused in plain words."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from sdp_plugins.torch import internals


def test_all_are_there() -> None:
    internals.check()
    for name in internals.MODULES:
        assert callable(importlib.import_module(name).add)


def test_says_what_has_moved(monkeypatch: Any) -> None:
    moved = {"UntypedStorage._nowhere": "moves a storage's bytes in place"}
    monkeypatch.setattr(internals, "NAMES", internals.NAMES | moved)
    with pytest.raises(ImportError, match=r"torch\.UntypedStorage\._nowhere, which moves"):
        internals.check()
