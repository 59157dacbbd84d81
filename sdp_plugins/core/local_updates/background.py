"""Threads that let the training compute."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def background() -> Iterator[None]:
    """Threads that are started within do not interrupt others: they wait for a free core.

    An exchange has time until it is due. Otherwise each arrival of data would take the core from
    a thread that trains, whose data then leave the core's cache. A thread inherits the policy of
    the one that starts it. A policy that the user has chosen is kept.
    """
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    _set(os.SCHED_BATCH)
    try:
        yield
    finally:
        _set(os.SCHED_OTHER)


def _set(policy: int) -> None:
    with suppress(OSError):  # sandboxes may forbid it
        os.sched_setscheduler(0, policy, os.sched_param(0))
