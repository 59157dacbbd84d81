"""How groups end, and what the other ranks read: exceptions, several closes, signal handlers."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sdp_plugins.core import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Group,
    PeerLostError,
    SdpError,
)
from tests.faults import gave_up, stay_away
from tests.ranks import Pool, start_ranks


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise AttributeError("no text")


ERRORS: dict[str, tuple[BaseException, str]] = {
    "plain": (ZeroDivisionError("in user's code\nand more"), "ZeroDivisionError: in user's code."),
    "without text": (KeyboardInterrupt(), "KeyboardInterrupt."),
    "without a text that can be had": (
        UnspeakableError(),
        "UnspeakableError: (its text cannot be shown).",
    ),
    "longer than there is room": (ValueError("\N{GRINNING FACE}" * 200), "ValueError: \U0001f600"),
    "cut within a character": (ValueError("x" + "\N{EURO SIGN}" * 200), "ValueError: x\u20ac"),
    "not text": (OSError("bad \udcff"), "OSError: bad \\udcff."),
    "exit with a text": (SystemExit("no data"), "SystemExit: no data."),
    "exit with a code": (SystemExit(3), "SystemExit: 3."),
}


def fail_in_a_block(rank: int, world: int, case: str) -> str:
    error = ERRORS[case][0]
    try:
        with Group.from_env(timeout_s=30) as group:
            if rank == 1:
                raise error
            group.barrier()
    except (type(error), PeerLostError) as caught:
        assert group.closed
        return "" if rank == 1 else str(caught)
    return "nobody noticed"


@pytest.mark.parametrize("case", ERRORS)
def test_peers_read_why_a_block_ended(rank_pool: Pool, case: str) -> None:
    text, _ = rank_pool(2).run(fail_in_a_block, case)
    assert f"rank 1 gave up: {ERRORS[case][1]}" in text
    assert "\N{REPLACEMENT CHARACTER}" not in text


def exit_well(rank: int, world: int) -> str:
    try:
        with Group.from_env(timeout_s=30) as group:
            if rank == 1:
                raise SystemExit(0)
            group.barrier()
    except (SystemExit, PeerLostError) as caught:
        return str(caught)
    return "nobody noticed"


def test_an_exit_without_failure_only_closes(rank_pool: Pool) -> None:
    assert "rank 1 has closed the group" in rank_pool(2).run(exit_well)[0]


def arrive_late(rank: int, world: int, ended: str) -> str:
    with Group.from_env(timeout_s=30) as group:
        group.barrier()
        if rank == 1:
            raise ValueError("the loss is not a number")
        while not Path(ended).exists():
            time.sleep(0.01)
        with pytest.raises(PeerLostError) as caught:
            group.barrier()
    return str(caught.value)


def test_why_a_rank_ended_outlives_its_process(tmp_path: Path) -> None:
    with start_ranks(2, arrive_late, str(tmp_path / "ended")) as ranks:
        ranks[1].finish()
        (tmp_path / "ended").touch()
        text = ranks[0].result()
    assert "rank 1 gave up: ValueError: the loss is not a number" in text


def leave_early(rank: int, world: int, ended: str) -> str:
    with Group.from_env(timeout_s=30) as group:
        group.barrier()
        if rank == 1:
            return ""
        while not Path(ended).exists():
            time.sleep(0.01)
        with pytest.raises(PeerLostError) as caught:
            group.barrier()
        with pytest.raises(PeerLostError, match="rank 1 has closed the group"):
            group.recv(np.zeros(1), 1)
    return str(caught.value)


def test_that_a_rank_left_in_good_order_outlives_its_process(tmp_path: Path) -> None:
    with start_ranks(2, leave_early, str(tmp_path / "ended")) as ranks:
        ranks[1].result()
        ranks[1].finish()
        (tmp_path / "ended").touch()
        text = ranks[0].result()
    assert "rank 1 has closed the group while it was needed" in text


def abort_after_closing(rank: int, world: int) -> str:
    group = Group.from_env(timeout_s=30)
    group.barrier()
    if rank == 1:
        group.close()
        group.abort("clean-up code ran twice")
        return ""
    with pytest.raises(PeerLostError) as caught:
        group.barrier()
    group.close()
    return str(caught.value)


def test_a_closed_group_cannot_be_aborted(rank_pool: Pool) -> None:
    assert "rank 1 has closed the group" in rank_pool(2).run(abort_after_closing)[0]


def close_in_two_threads(rank: int, world: int) -> None:
    for turn in range(50):
        group = Group.from_env(name=str(turn), timeout_s=100)
        group.all_reduce(np.ones(4), async_op=True)
        group.recv(np.ones(4), 1 - rank, async_op=True)
        threads = [threading.Thread(target=group.close) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_closed_by_several_threads_at_once(rank_pool: Pool) -> None:
    rank_pool(2).run(close_in_two_threads)


def close_in_a_handler(rank: int, world: int, ended: str) -> None:
    """The handler runs within an operation, behind which another thread has queued one."""
    group = Group.from_env(timeout_s=30)
    group.barrier()
    if rank == 1:
        while not Path(ended).exists():
            time.sleep(0.01)
        group.close()
        return
    before = signal.signal(signal.SIGUSR1, lambda number, frame: group.close())

    def interrupt() -> None:
        queued = group.all_reduce(np.ones(4), async_op=True)
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SdpError, match="the group is closed"):
            queued.wait()

    thread = threading.Timer(0.3, interrupt)
    thread.start()
    with pytest.raises(SdpError, match="the group is closed"):
        group.barrier()
    thread.join()
    signal.signal(signal.SIGUSR1, before)
    Path(ended).touch()


def test_closed_by_a_signal_handler(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool(2).run(close_in_a_handler, str(tmp_path / "ended"))


def interrupt_the_making_of_an_error(rank: int, world: int) -> None:
    """Ctrl-C ends all ranks at once: it comes while a peer's end is put into words."""
    group = Group.from_env(timeout_s=30)
    group.close()

    def from_native(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdp_plugins.core.errors.from_native", from_native)
        with pytest.raises(KeyboardInterrupt):
            group.barrier()
    with pytest.raises(SdpError, match="closed"):
        group.barrier()


def test_ctrl_c_beside_a_failure(rank_pool: Pool) -> None:
    rank_pool(2).run(interrupt_the_making_of_an_error)


def leave_a_daemon_thread(rank: int, world: int, way: str, ended: str) -> None:
    """The script's end is reached while a daemon thread waits in an operation."""
    group = Group.from_env(timeout_s=30)
    group.barrier()
    ways: dict[str, Callable[[], object]] = {
        "blocking": group.barrier,
        "work": lambda: group.barrier(async_op=True).wait(),  # type: ignore[union-attr]
        "receive": lambda: group.recv(np.zeros(4), 1 - rank),
        "closed at exit": group.barrier,
    }
    if rank == 0:
        if way == "closed at exit":  # then the thread wakes up while the interpreter ends
            atexit.register(group.close)
        threading.Thread(target=ways[way], daemon=True).start()
        time.sleep(0.3)
        return
    while not Path(ended).exists():
        time.sleep(0.01)
    group.close()


@pytest.mark.parametrize("way", ["blocking", "work", "receive", "closed at exit"])
def test_a_waiting_daemon_thread_does_not_spoil_the_end(tmp_path: Path, way: str) -> None:
    with start_ranks(2, leave_a_daemon_thread, way, str(tmp_path / "ended")) as ranks:
        ranks[0].result()
        assert ranks[0].finish() == 0, ranks[0].output()
        (tmp_path / "ended").touch()
        ranks[1].result()


def disagree_without_one(rank: int, world: int) -> str:
    with Group.from_env() as group:
        group.barrier()
        group.timeout_s = 5  # on a busy machine the others take a while
        if rank == 2:
            stay_away(waiting=2, involved=3)
        with pytest.raises((CollectiveTimeoutError, CollectiveMismatchError)) as caught:
            group.all_reduce(np.zeros(8 if rank else 4))
        if rank != 2:
            gave_up()
    return str(caught.value)


def test_a_missing_rank_does_not_hide_a_disagreement(rank_pool: Pool) -> None:
    for text in rank_pool(3).run(disagree_without_one)[:2]:
        assert "rank 2 did not arrive in 5 s" in text
        assert (
            "those that arrived disagree: rank 0: all_reduce #2 float64[4] sum; "
            "rank 1: all_reduce #2 float64[8] sum" in text
        )
