"""Test functions that run in a process of their own, in which the device is loaded.

    on_device = OnDevice(__name__)

    @on_device
    def copies_are_asynchronous() -> None: ...

    test = on_device.test()

Loading the device changes torch for the whole process, so the tests' own process never does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from tests import simdev
from tests.ranks import run_ranks

DEADLINE_S = 100.0  # of each wait: only a hang takes it


class OnDevice:
    """The cases of a module, and the test that runs each."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.names: list[str] = []

    def __call__(self, case: Callable[[], None]) -> Callable[[], None]:
        """Add a case."""
        self.names.append(case.__name__)
        return case

    def test(self) -> Callable[[str], None]:
        """A test for pytest, parametrized with the cases so far."""

        @pytest.mark.parametrize("case", self.names)
        def test(case: str) -> None:
            run_ranks(1, run_case, self.module, case)

        return test


def run_case(_rank: int, _world: int, module: str, case: str) -> None:
    """Run one case here."""
    simdev.load()
    simdev.set_deadline(DEADLINE_S)
    getattr(importlib.import_module(module), case)()
