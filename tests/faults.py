"""Failures that tests inject into ranks, when the test says so, and users that they act as."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.ranks import HANG_S, Ranks, say

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def die(said: str = "") -> None:
    """In a rank: end at once, as by the kernel's OOM killer; tell the test before."""
    if said:
        say(said)
    os.kill(os.getpid(), signal.SIGKILL)


def gave_up() -> None:
    """In a rank: one more has waited in vain, for the ranks that `stay_away`."""
    with _waited_in_vain().open("ab", buffering=0) as file:
        file.write(b".")


def stay_away(waiting: int, involved: int) -> None:
    """In a rank: do nothing until so many of the job's ranks have waited in vain.

    The others of those who are involved stay away.
    """
    file, end = _waited_in_vain(), time.monotonic() + HANG_S
    while not file.exists() or file.stat().st_size < waiting:
        assert time.monotonic() < end, "nobody has given up"
        time.sleep(0.01)
    gave_up()  # nobody needs the file when all have come here
    with suppress(FileNotFoundError):
        if file.stat().st_size >= involved:
            file.unlink()


def _waited_in_vain() -> Path:
    return Path(tempfile.gettempdir(), f"gave-up-{os.environ['SDP_JOB_ID']}")


@contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Make this process's new sockets another user's."""
    own = os.geteuid()
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(own)


def wait_for_go() -> None:
    """In a rank: wait until the test sends SIGUSR1."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    say("waiting")
    signal.sigwait({signal.SIGUSR1})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def go(ranks: Ranks) -> None:
    for rank in ranks:
        go_rank(ranks, rank.rank)


def go_rank(ranks: Ranks, rank: int) -> None:
    assert ranks[rank].heard() == "waiting"
    ranks[rank].kill(signal.SIGUSR1)
