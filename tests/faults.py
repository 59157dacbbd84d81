"""Failures that tests inject into ranks, when the test says so, and users that they act as."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.ranks import Ranks, say

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def die(said: str = "") -> None:
    """In a rank: end at once, as by the kernel's OOM killer; tell the test before."""
    if said:
        say(said)
    os.kill(os.getpid(), signal.SIGKILL)


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
