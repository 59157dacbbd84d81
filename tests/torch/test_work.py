"""Handles of asynchronous calls and their futures."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sdp_plugins.core import CollectiveTimeoutError, PeerLostError
from tests.ranks import HANG_S, run_ranks, say, start_ranks
from tests.torch.jobs import assert_same, process_group, total, values


def run_handles(rank: int, world: int) -> None:
    with process_group() as group:
        tensor = values(rank, 100)
        work = dist.all_reduce(tensor, async_op=True)
        assert work.wait(timedelta(seconds=30))
        assert work.wait()
        assert work.wait(timedelta(0))  # how C++ says "no limit"
        assert work.result()[0] is tensor
        work.synchronize()
        (value,) = work.get_future().wait()
        assert value is tensor
        assert_same(tensor, total(world, 100))
        assert not group._works

        done = group.allreduce([values(rank, 3)], blocking())
        assert done.is_completed()
        assert_same(done.get_future().value()[0], total(world, 3))

        works = [dist.all_reduce(values(rank, n), async_op=True) for n in range(200)]
        for n, work in reversed(list(enumerate(works))):  # in any order
            work.wait()
            assert_same(work.result()[0], total(world, n))


def blocking() -> Any:
    options = dist.AllreduceOptions()
    options.asyncOp = False
    return options


def test_handles(rank_pool: Any) -> None:
    rank_pool(2).run(run_handles)


def run_wait_too_short(rank: int, world: int) -> None:
    with process_group():
        if rank == 0:
            work = dist.all_reduce(values(rank, 5), async_op=True)
            assert not work.is_completed()
            assert not work.is_success()
            with pytest.raises(CollectiveTimeoutError, match="all_reduce"):
                work.wait(timedelta(milliseconds=50))
            assert work.exception() is None  # the operation goes on
            dist.barrier(group=dist.new_group(backend="gloo"))
            work.wait()
            assert_same(work.result()[0], total(world, 5))
        else:
            dist.barrier(group=dist.new_group(backend="gloo"))
            dist.all_reduce(values(rank, 5))


def test_a_wait_that_times_out_leaves_the_operation(rank_pool: Any) -> None:
    rank_pool(2).run(run_wait_too_short)


def run_dropped_handles(rank: int, world: int) -> None:
    """Nobody keeps the handle: results come all the same and nothing is kept for ever."""
    with process_group() as group:
        tensors = [values(rank, 1000) for _ in range(500)]
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
        dist.barrier()
        for tensor in tensors:
            assert_same(tensor, total(world, 1000))
        references = []
        for _ in range(300):
            tensor = values(rank, 10)
            references.append(weakref.ref(tensor))
            dist.all_reduce(tensor, async_op=True)
        del tensor
        dist.barrier()
        for _ in range(200):  # later calls sweep
            dist.all_reduce(torch.zeros(1), async_op=True).wait()
        gc.collect()
        assert sum(reference() is not None for reference in references) == 0
        assert len(group._works) == 0


def test_dropped_handles(rank_pool: Any) -> None:
    rank_pool(2).run(run_dropped_handles)


def run_unwaited_at_the_end(rank: int, world: int) -> list[float]:
    with process_group():
        tensor = values(rank, 100_000)
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 0:
            time.sleep(0.1)
            work.wait()
    return tensor[:3].tolist()


def test_destroying_does_not_fail_a_peer_that_still_waits(rank_pool: Any) -> None:
    expected = total(2, 3).tolist()
    assert rank_pool(2).run(run_unwaited_at_the_end) == [expected, expected]


def run_finished_works(rank: int, world: int) -> int:
    """What was dropped is let go of by whatever comes next."""
    with process_group():
        tensors = [torch.ones(100) for _ in range(20)]
        alive = [weakref.ref(tensor) for tensor in tensors]
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
        del tensor, tensors
        dist.barrier()
        for _ in range(30):
            dist.all_reduce(torch.ones(3))
        gc.collect()
        return sum(tensor() is not None for tensor in alive)


def test_finished_works_keep_nothing(rank_pool: Any) -> None:
    assert rank_pool(2).run(run_finished_works) == [0, 0]


def run_a_handler_that_leaves(rank: int, world: int) -> None:
    dist.init_process_group("smddp")
    if rank == 0:
        work = dist.all_reduce(values(rank, 1000), async_op=True)
        left: list[bool] = []

        def leave(*_: Any) -> None:
            dist.destroy_process_group()
            left.append(True)

        signal.signal(signal.SIGALRM, leave)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        while not left:  # the signal comes in the middle of an answer, most likely
            work.is_completed()
        say("left")
    else:
        time.sleep(600)


def test_a_handler_may_leave_while_its_thread_asks() -> None:
    with start_ranks(2, run_a_handler_that_leaves) as ranks:
        assert ranks[0].heard() == "left"


def run_receive_futures(rank: int, world: int) -> None:
    """Receives complete in the order of the sends, whatever order their futures were asked in."""
    with process_group():
        if rank == 0:
            tensors = [torch.empty(4) for _ in range(3)]
            futures = [dist.irecv(t, 1, tag=n).get_future() for n, t in enumerate(tensors)]
            futures[2].wait()
            assert_same(tensors[2], values(2, 4))
            assert not futures[0].done()
            assert [t.name for t in threading.enumerate()].count("sdp-p2p-futures") == 1
            dist.send(torch.zeros(1), 1)
            torch.futures.wait_all(futures)
            assert_same(tensors, [values(n, 4) for n in range(3)])
        else:
            dist.send(values(2, 4), 0, tag=2)
            dist.recv(torch.empty(1), 0)
            dist.send(values(1, 4), 0, tag=1)
            dist.send(values(0, 4), 0, tag=0)


def test_receive_futures(rank_pool: Any) -> None:
    rank_pool(2).run(run_receive_futures)


def lose_a_peer(rank: int, world: int) -> None:
    dist.init_process_group("smddp")
    dist.barrier()
    if rank == 1:
        say("ready")
        time.sleep(60)
    works = [dist.all_reduce(values(rank, 1000), async_op=True) for _ in range(2)]
    futures = [work.get_future() for work in works]
    chained = futures[1].then(lambda f: f.value())
    say("waiting")
    for waiting in (works[0].wait, works[1].wait, futures[0].wait, chained.wait):
        with pytest.raises(PeerLostError, match="rank 1") as caught:
            waiting()
        assert caught.value.ranks == (1,)
    assert works[0].is_completed()
    assert not works[0].is_success()
    assert isinstance(works[0].exception(), PeerLostError)
    with pytest.raises(PeerLostError):
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def test_errors_come_through_handles_and_futures() -> None:
    with start_ranks(2, lose_a_peer) as ranks:
        assert ranks[1].heard() == "ready"
        assert ranks[0].heard() == "waiting"
        ranks[1].kill()
        ranks[0].result()
        assert ranks[0].finish() == 0


def fail_often(rank: int, world: int) -> int:
    """How many tensors outlive the futures of operations that have failed with them."""
    alive = []
    with process_group():
        for _ in range(3):
            group = dist.new_group()
            group.set_timeout(timedelta(seconds=0.2))
            if rank == 0:
                tensor = torch.ones(1000)
                alive.append(weakref.ref(tensor.untyped_storage()))
                future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
                future = future.then(lambda done: done.value()[0].sum())
                del tensor
                with pytest.raises(CollectiveTimeoutError):
                    future.wait()
                del future
            dist.barrier()
            dist.destroy_process_group(group)
            del group
    gc.collect()
    return sum(storage() is not None for storage in alive)


def test_failed_futures_keep_nothing(rank_pool: Any) -> None:
    assert rank_pool(2).run(fail_often) == [0, 0]


def drop_many(rank: int, world: int) -> int:
    """How many tensors of works that nobody waits for outlive the next blocking call."""
    with process_group():
        alive = []
        for _ in range(50):
            tensor = torch.ones(1000)
            alive.append(weakref.ref(tensor.untyped_storage()))
            dist.all_reduce(tensor, async_op=True)
        del tensor
        dist.barrier()
        return sum(storage() is not None for storage in alive)


def test_works_that_nobody_waits_for_end_with_the_next_call(rank_pool: Any) -> None:
    assert rank_pool(2).run(drop_many) == [0, 0]


def lack_a_thread(rank: int, world: int) -> None:
    with process_group():
        work = dist.irecv(torch.ones(1), 1 - rank)
        with (
            mock.patch("threading.Thread.start", side_effect=RuntimeError("no more")),
            pytest.raises(RuntimeError, match="no more"),
        ):
            work.get_future()
        dist.barrier()  # until then nobody sends
        dist.send(torch.ones(1), 1 - rank)
        work.wait()
    assert not dist.is_initialized()


def test_a_group_ends_in_good_order_where_a_thread_could_not_start(rank_pool: Any) -> None:
    rank_pool(2).run(lack_a_thread)


def ended(pid: int) -> int | None:
    """A child's exit code; None if it hung and was killed."""
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        if (found := os.waitpid(pid, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(found[1])
        time.sleep(0.002)
    os.kill(pid, signal.SIGUSR2)  # writes its stacks
    time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def fork_beside_a_busy_thread(rank: int, world: int) -> None:
    """No child hangs that uses a group whose locks a thread may have held in the fork."""
    with process_group() as group:
        other = dist.new_group()
        calls = (
            lambda: dist.isend(torch.ones(1), 1 - rank, group=other),
            lambda: dist.all_reduce(torch.ones(1), group=other),
            other._get_sequence_number_for_group,
        )
        going, over = threading.Event(), threading.Event()
        busy = threading.Thread(target=keep_busy, args=(rank, other, going, over))
        busy.start()
        assert going.wait(HANG_S)  # torch initializes an operator at its first use, with a lock
        for turn in range(60):
            if (pid := os.fork()) == 0:
                with suppress(BaseException):
                    calls[turn % len(calls)]()
                os._exit(0)
            assert ended(pid) == 0
        over.set()
        busy.join()
        group.barrier().wait()


def keep_busy(rank: int, group: Any, going: threading.Event, over: threading.Event) -> None:
    data = torch.ones(2000)
    while True:
        works = [dist.all_reduce(data * 0, async_op=True, group=group) for _ in range(8)]
        works.append(dist.isend(data, 1 - rank, group=group))
        works.append(dist.irecv(torch.empty(2000), 1 - rank, group=group))
        for work in works:
            work.wait()
        enough = torch.tensor([float(over.is_set())])
        dist.all_reduce(enough, dist.ReduceOp.MIN, group=group)
        going.set()
        if enough.item():
            return


def test_forked_children_do_not_hang_at_locks() -> None:
    run_ranks(2, fork_beside_a_busy_thread)
