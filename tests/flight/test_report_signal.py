"""SIGUSR1: a rank says what its node's ranks wait for, and takes the signal from nobody."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

import pytest

from sdp_plugins.core import Group
from tests.flight.cases import (
    LONG_S,
    alone,
    one_is_late,
    queue_many,
    receive_in_vain,
    until_seen,
)
from tests.leaks import no_leaks
from tests.ranks import HANG_S, Ranks, Start, run_ranks, say, start_ranks


def ask(ranks: Ranks, rank: int, *parts: str) -> str:
    """Send the signal; what the rank has written to stderr."""
    ranks[rank].kill(signal.SIGUSR1)
    head = rf"rank {rank} \(pid {ranks[rank].pid}\), SIGUSR1: "
    return until_seen(ranks, head, *parts, read=ranks[rank].output)


WAITED = "ranks 0, 1 have waited .* in all_reduce #2 .* for rank 2"


@pytest.mark.parametrize("how", ["absent", "stopped"])
def test_of_a_rank_that_waits_and_of_one_that_does_not_come(start_pooled: Start, how: str) -> None:
    with start_pooled(3, one_is_late, how) as ranks:
        until_seen(ranks, WAITED)
        ask(ranks, 0, WAITED, "rank 2 .*" + ("is stopped" if how == "stopped" else "no operation"))
        if how == "absent":
            ask(ranks, 2, WAITED)
        assert ranks[0].output().count("SIGUSR1") == 1
        ranks[0].kill(signal.SIGUSR1)
        until_seen(ranks, "(?s)SIGUSR1.*SIGUSR1", read=ranks[0].output)


def test_of_queued_operations_messages_and_groups_of_one(start_pooled: Start) -> None:
    with start_pooled(2, queue_many) as ranks:
        until_seen(ranks, "for rank 1")
        ask(ranks, 0, "rank 0 has waited .* in all_reduce #1 .* for rank 1")
    with start_pooled(2, receive_in_vain) as ranks:
        until_seen(ranks, "recv #1")
        ask(ranks, 1, "rank 0 has waited .* in recv #1 float64.7. from rank 1 tag 3")
    with start_pooled(1, alone) as ranks:
        until_seen(ranks, "nobody waits")
        ask(ranks, 0, "nobody waits; its last: all_reduce #1")


def wait_where_no_python_runs(rank: int, world: int) -> None:
    """The main thread waits in C, for a lock that nobody gives back, as for a data loader."""
    with Group.from_env(name="flown", timeout_s=LONG_S) as group:
        group.barrier()
        say("going")
        if rank == 0:
            threading.Lock().acquire() and threading.Event().wait()
        group.barrier()


def test_of_a_main_thread_that_is_stuck(start_pooled: Start) -> None:
    with start_pooled(2, wait_where_no_python_runs) as ranks:
        until_seen(ranks, "rank 1 has waited .* in barrier #2 for rank 0")
        ask(ranks, 0, "rank 1 has waited .* in barrier #2 for rank 0")


def handlers() -> object:
    return signal.getsignal(signal.SIGUSR1)


def disposition() -> int:
    """Whether the kernel has a handler for SIGUSR1."""
    with open("/proc/self/status") as file:
        caught = next(line for line in file if line.startswith("SigCgt:"))
    return int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1


def make_and_close(rank: int, world: int) -> None:
    assert not disposition()
    with no_leaks():
        first = Group.from_env(name="first", timeout_s=30)
        second = Group.from_env(name="second", timeout_s=30)
        assert disposition() and handlers() is signal.SIG_DFL
        assert [t.name for t in threading.enumerate()].count("sdp-signal") == 1
        first.close()
        assert disposition()
        second.close()
        assert not disposition() and handlers() is signal.SIG_DFL
        del first, second


def test_it_begins_with_the_first_group_and_ends_with_the_last() -> None:
    run_ranks(2, make_and_close)  # a pool's ranks may keep a group


def make_without(rank: int, world: int, what: str, error: type[Exception]) -> None:
    with no_leaks():
        with mock.patch(what, side_effect=error):
            group = Group.from_env(name="frugal", timeout_s=30)
        assert not disposition()
        group.barrier()
        group.close()
        del group


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("os.eventfd", OSError),
        ("threading.Thread.start", RuntimeError),
    ],
)
def test_a_group_works_without(what: str, error: type[Exception]) -> None:
    run_ranks(2, make_without, what, error)


def have_a_handler(rank: int, world: int) -> None:
    came: list[int] = []

    def mine(number: int, frame: object) -> None:
        came.append(number)

    signal.signal(signal.SIGUSR1, mine)
    with Group.from_env(timeout_s=30) as group:  # ours comes second: it stays away
        assert handlers() is mine
        os.kill(os.getpid(), signal.SIGUSR1)
        group.barrier()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with Group.from_env(timeout_s=30) as group:
        assert handlers() is signal.SIG_IGN and not disposition()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    with Group.from_env(timeout_s=30) as group:  # theirs comes second: it replaces ours
        assert handlers() is signal.SIG_DFL
        signal.signal(signal.SIGUSR1, mine)
        os.kill(os.getpid(), signal.SIGUSR1)
        group.barrier()
    assert handlers() is mine and disposition()
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert came == [signal.SIGUSR1] * 2


def test_it_takes_the_signal_from_nobody() -> None:
    with start_ranks(2, have_a_handler) as ranks:
        ranks.results()
        assert all("SIGUSR1" not in rank.output() for rank in ranks)
        ranks.finish()


def put_our_handler_back(rank: int, world: int) -> None:
    """As who saves a handler and restores it when the last group has been closed."""
    with Group.from_env(timeout_s=30):
        faulthandler.register(signal.SIGUSR1, chain=True)
    faulthandler.unregister(signal.SIGUSR1)
    assert disposition()
    with Group.from_env(name="next", timeout_s=30) as group:
        say("again")
        group.barrier()
        if rank == 0:
            time.sleep(LONG_S)
        group.barrier()


def test_a_handler_that_others_put_back_is_ours() -> None:
    with start_ranks(1, put_our_handler_back) as ranks:
        assert ranks[0].heard() == "again"
        ask(ranks, 0, "nobody waits")


def end_by_it(rank: int, world: int) -> None:
    with Group.from_env(timeout_s=30):
        faulthandler.register(signal.SIGUSR1, chain=True)
    faulthandler.unregister(signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(LONG_S)


def test_without_a_group_the_signal_ends_the_process() -> None:
    with start_ranks(1, end_by_it) as ranks:
        assert ranks[0].outcome().exitcode == -signal.SIGUSR1


def fork_one(rank: int, world: int) -> int:
    with Group.from_env(timeout_s=30) as group:
        pid = os.fork()
        if pid == 0:
            try:
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(5)
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        group.barrier()
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_has_the_signals_default() -> None:
    with start_ranks(2, fork_one) as ranks:
        assert ranks.results() == [-signal.SIGUSR1] * 2
        assert all("SIGUSR1" not in rank.output() for rank in ranks)
        ranks.finish()


def ask_oneself() -> None:
    with Group.from_env(name="child", timeout_s=30) as group:
        os.kill(os.getpid(), signal.SIGUSR1)
        group.barrier()
        time.sleep(0.5)


def fork_one_with_groups(rank: int, world: int) -> None:
    with Group.from_env(timeout_s=30) as group:
        pid = os.fork()
        if pid == 0:
            try:
                with no_leaks():
                    ask_oneself()
                os._exit(int(disposition()))
            finally:
                os._exit(77)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        group.barrier()
        assert disposition()


def test_a_forked_child_that_makes_groups_has_a_report_of_its_own() -> None:
    with start_ranks(2, fork_one_with_groups) as ranks:
        ranks.results()
        for rank in ranks:
            assert (
                rank.output().count("SIGUSR1") == 1 and "group child (ranks 0, 1" in rank.output()
            )
        ranks.finish()


LEFT_OPEN = """
import os, signal, numpy
from sdp_plugins.core import Group
group = Group.from_env()
group.all_reduce(numpy.ones(10))
os.kill(os.getpid(), signal.SIGUSR1)
"""


def test_a_process_that_closes_nothing_ends() -> None:
    for _ in range(5):
        line = [sys.executable, "-c", LEFT_OPEN]
        subprocess.run(line, timeout=HANG_S, check=True, capture_output=True)
