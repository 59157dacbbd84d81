"""The thread that calls MPI while nobody else does, without MPI."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from sdp_plugins.core.internode import mpi_progress
from sdp_plugins.core.internode.mpi_progress import MpiProgress

LIMIT_S = 100.0


class Mpi:
    """Counts calls, and sees whether their caller has the lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.calls = 0

    def poke(self) -> None:
        assert self.lock._is_owned()  # type: ignore[attr-defined]
        self.calls += 1

    def is_called(self) -> bool:
        """Whether it is called any more."""
        before, end = self.calls, time.monotonic() + LIMIT_S
        while self.calls < before + 3 and time.monotonic() < end:
            time.sleep(0.001)
        return self.calls >= before + 3


@pytest.fixture
def mpi() -> Mpi:
    return Mpi()


@pytest.fixture
def make(mpi: Mpi) -> Iterator[Callable[..., MpiProgress]]:
    made = []

    def make(**options: bool) -> MpiProgress:
        made.append(MpiProgress(mpi.lock, mpi.poke, **options))
        return made[-1]

    yield make
    for progress in made:
        progress.end(LIMIT_S)
    assert not [thread for thread in threading.enumerate() if thread.name == "sdp-mpi"]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_mpi_is_called_while_its_user_waits_for_something_else(
    mpi: Mpi, make: Callable[..., MpiProgress]
) -> None:
    with make():
        assert mpi.is_called()


def test_what_is_left_in_queues_goes_on_afterwards(
    mpi: Mpi, make: Callable[..., MpiProgress]
) -> None:
    with make():
        pass
    assert mpi.is_called()


def test_not_for_ever(
    mpi: Mpi, make: Callable[..., MpiProgress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi_progress, "LINGER_S", 0.05)
    progress = make()
    for _ in range(2):  # and it begins again
        with progress:
            assert mpi.is_called()
        until(lambda: not progress._needed.is_set())


def test_outside_of_waits_mpi_may_be_the_programs(
    mpi: Mpi, make: Callable[..., MpiProgress]
) -> None:
    progress = make(lingers=False)
    with progress:
        with progress:  # another group's
            assert mpi.is_called()
        assert mpi.is_called()
    calls = mpi.calls
    until(lambda: not progress._needed.is_set())
    assert mpi.calls == calls
