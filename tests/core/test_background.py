"""Threads that let the training compute."""

from __future__ import annotations

import os
from concurrent.futures import Future
from threading import Thread
from unittest import mock

from sdp_plugins.core.local_updates.background import background


def policy_of_a_thread() -> int:
    found: Future[int] = Future()
    Thread(target=lambda: found.set_result(os.sched_getscheduler(0)), daemon=True).start()
    return found.result(60)


def test_threads_started_within_are_of_the_background() -> None:
    with background():
        assert policy_of_a_thread() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert policy_of_a_thread() == os.SCHED_OTHER


def test_the_users_policy_is_kept() -> None:
    def check() -> tuple[int, int]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with background():
            inside = policy_of_a_thread()
        return inside, os.sched_getscheduler(0)

    found: Future[tuple[int, int]] = Future()
    Thread(target=lambda: found.set_result(check()), daemon=True).start()
    assert found.result(60) == (os.SCHED_IDLE, os.SCHED_IDLE)


def test_a_sandbox_may_forbid_it() -> None:
    with mock.patch("os.sched_setscheduler", side_effect=PermissionError), background():
        assert policy_of_a_thread() == os.SCHED_OTHER
