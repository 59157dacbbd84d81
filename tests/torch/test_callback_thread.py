"""The thread that completes futures, without a group."""

from __future__ import annotations

import os
import threading
import time

import pytest

from sdp_plugins.torch.callback_thread import CallbackThread


def test_a_task_finds_itself_in_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it runs before its starter goes on."""
    start = threading.Thread.start

    def start_and_sleep(thread: threading.Thread) -> None:
        start(thread)
        time.sleep(0.1)

    monkeypatch.setattr(threading.Thread, "start", start_and_sleep)
    thread, found = CallbackThread("test"), []
    thread.when_done((), lambda: found.append(thread.is_current()))
    thread.stop()
    assert found == [True]


def test_completions_overtake_callbacks_which_keep_their_order() -> None:
    thread, order = CallbackThread("test"), []
    ready = threading.Event()
    thread.call_back_when(ready.is_set, lambda: order.append(1))
    thread.call_back_when(lambda: True, lambda: order.append(2))
    thread.when_done((), lambda: (order.append(0), ready.set())[0])
    thread.stop()
    assert order == [0, 1, 2]
    thread.call_back_when(lambda: True, lambda: order.append(3))
    assert order == [0, 1, 2, 3]  # nothing is lost after the end


def test_a_forked_child_runs_tasks_at_once() -> None:
    thread, done = CallbackThread("test"), threading.Event()
    thread.when_done((), done.set)
    done.wait()  # the thread runs, in this process only
    child = os.fork()
    if child == 0:
        ran: list[int] = []
        thread.call_back_when(lambda: False, lambda: ran.append(1))
        os._exit(0 if ran else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    thread.stop()
