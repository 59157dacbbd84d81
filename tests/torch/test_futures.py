"""Futures of asynchronous calls, and the callbacks that are added to them."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp_plugins.core import CollectiveTimeoutError, SdpError
from tests.ranks import HANG_S, say, start_ranks
from tests.torch.jobs import assert_same, process_group, total, values


def run_futures(rank: int, world: int) -> None:
    with process_group():
        order: list[int] = []
        futures = []
        for n in range(20):
            future = dist.all_reduce(values(rank, 10 + n), async_op=True).get_future()
            chained = future.then(lambda f, n=n: (order.append(n), f.value()[0] * 2)[1])
            futures.append(chained.then(lambda f: f.wait() + 1))
        for n, future in enumerate(futures):
            assert_same(future.wait(), 2 * total(world, 10 + n) + 1)
        assert order == list(range(20))

        seen: list[Any] = []
        future = dist.all_reduce(values(rank, 3), async_op=True).get_future()
        future.add_done_callback(seen.append)
        assert future.then(lambda f: len(seen)).wait() == 1
        assert seen == [future]

        joined = torch.futures.wait_all(
            [dist.all_reduce(values(rank, 3), async_op=True).get_future() for _ in range(3)]
        )
        assert_same(joined, [[total(world, 3)]] * 3)


def test_futures(rank_pool: Any) -> None:
    rank_pool(2).run(run_futures)


def run_collectives_in_callbacks(rank: int, world: int) -> None:
    """What PowerSGD does: its callbacks reduce, while the main thread goes on reducing."""

    def reduce_again(future: Any) -> torch.Tensor:
        first = future.value()[0]
        work = dist.all_reduce(first, async_op=True)
        (second,) = work.get_future().wait()
        dist.all_reduce(second)
        return second

    with process_group():
        futures = []
        for n in range(30):
            if rank == n % world:
                time.sleep(0.002)  # so that ranks differ in what is done first
            work = dist.all_reduce(values(rank, 100 + n), async_op=True)
            futures.append(work.get_future().then(reduce_again))
            other = values(rank, 7)
            dist.all_reduce(other)
            assert_same(other, total(world, 7))
        for n, future in enumerate(futures):
            assert_same(future.wait(), world * world * total(world, 100 + n))


@pytest.mark.parametrize("world", [2, 3])
def test_collectives_in_callbacks(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(run_collectives_in_callbacks)


def run_waits_in_callbacks(rank: int, world: int) -> None:
    """A callback may wait for, or go on from, what is only issued after it was added."""
    with process_group():
        futures: list[Any] = []
        issued = threading.Event()

        def add_all(first: Any) -> torch.Tensor:
            issued.wait(HANG_S)
            (added,) = futures[1].then(lambda f: [f.value()[0] + 1]).wait()
            return first.value()[0] + futures[0].wait()[0] + added

        first = dist.all_reduce(values(rank, 5), async_op=True).get_future()
        everything = first.then(add_all)
        for _ in range(2):
            futures.append(dist.all_reduce(values(rank, 5), async_op=True).get_future())
        issued.set()
        assert_same(everything.wait(), 3 * total(world, 5) + 1)


def test_waits_in_callbacks(rank_pool: Any) -> None:
    rank_pool(2).run(run_waits_in_callbacks)


def run_callbacks_in_order(rank: int, world: int) -> None:
    """A callback that waits lets no other one overtake it, whoever of the ranks has to wait."""
    with process_group():
        for late in range(world):
            first, second = (dist.all_reduce(values(rank, 5), async_op=True) for _ in range(2))
            third = dist.all_reduce(values(rank, 100_000), async_op=True)
            if rank == late:
                time.sleep(0.1)  # here the third is done before the callbacks are added
            futures: list[Any] = []
            ready = threading.Event()

            def wait_first(f: Any, futures: Any = futures, ready: Any = ready) -> torch.Tensor:
                ready.wait(HANG_S)
                futures[0].wait()
                tensor = torch.full((3,), 1.0)
                dist.all_reduce(tensor)
                return tensor

            def at_once(f: Any) -> torch.Tensor:
                tensor = torch.full((3,), 100.0)
                dist.all_reduce(tensor)
                return tensor

            results = [first.get_future().then(wait_first), second.get_future().then(at_once)]
            futures.append(third.get_future())
            ready.set()
            assert_same([r.wait() for r in results], [torch.full((3,), v) for v in (2.0, 200.0)])


def test_callbacks_keep_their_order(rank_pool: Any) -> None:
    rank_pool(2).run(run_callbacks_in_order)


def run_callbacks_of_itself(rank: int, world: int) -> None:
    """A callback may add one to what it is about to return, and go on with other futures."""
    with process_group():
        box: list[Any] = []
        known = threading.Event()

        def add(f: Any) -> int:
            known.wait(HANG_S)
            box.append(box[0].then(lambda g: g.value() + 1))
            return 1

        box.append(dist.all_reduce(values(rank, 3), async_op=True).get_future().then(add))
        known.set()
        assert box[0].wait() == 1
        assert box[1].wait() == 2
        later = dist.all_reduce(values(rank, 3), async_op=True).get_future()
        assert later.then(lambda f: 3).wait() == 3


def test_callbacks_of_itself(rank_pool: Any) -> None:
    rank_pool(2).run(run_callbacks_of_itself)


def run_changed_time_out(rank: int, world: int) -> float:
    """Callbacks reduce with the group's time-out as it is then."""
    with process_group() as group:
        group.set_timeout(timedelta(seconds=0.5))

        def reduce_alone(f: Any) -> float:
            start = time.monotonic()
            with pytest.raises(CollectiveTimeoutError):
                dist.all_reduce(torch.ones(1))
            return time.monotonic() - start

        future = dist.all_reduce(values(rank, 5), async_op=True).get_future()
        dist.all_reduce(values(rank, 5))
        if rank == 0:
            return float(future.then(reduce_alone).wait())
        future.then(lambda f: group._current_group() and time.sleep(1.5)).wait()
        return 0.0


def test_time_out_in_callbacks(rank_pool: Any) -> None:
    assert rank_pool(2).run(run_changed_time_out)[0] > 0.4


def run_messages_in_callbacks(rank: int, world: int) -> None:
    """A message finds its receiver, whether that is a callback or not."""
    with process_group():
        future = dist.all_reduce(values(rank, 5), async_op=True).get_future()
        received = torch.zeros(3)
        if rank == 0:
            sent = future.then(lambda f: dist.send(values(7, 3), 1))
            dist.recv(received, 1)
            sent.wait()
        else:
            dist.recv(received, 0)
            future.then(lambda f: dist.send(values(7, 3), 0)).wait()
        assert_same(received, values(7, 3))


def test_messages_in_callbacks(rank_pool: Any) -> None:
    rank_pool(2).run(run_messages_in_callbacks)


def run_callbacks_of_combined_futures(rank: int, world: int) -> None:
    """torch runs them on whichever thread completes the last part."""
    with process_group():
        for late in range(world):
            works = [dist.all_reduce(values(rank, 5), async_op=True) for _ in range(2)]
            futures = [work.get_future() for work in works]
            if rank == late:
                torch.futures.wait_all(futures)
            result = values(rank, 3)
            combined = torch.futures.collect_all(futures)
            combined.then(lambda f, result=result: dist.all_reduce(result)).wait()
            assert_same(result, total(world, 3))


def test_callbacks_of_combined_futures(rank_pool: Any) -> None:
    rank_pool(2).run(run_callbacks_of_combined_futures)


def run_futures_kept_beyond_a_pass(rank: int, world: int) -> None:
    """A backward pass does not wait for futures that only its hooks know."""
    with process_group():
        weight = torch.ones(8, requires_grad=True)
        futures: list[Any] = []

        def hook(parameter: torch.Tensor) -> None:
            work = dist.all_reduce(parameter.grad, async_op=True)
            futures.append(work.get_future())

        weight.register_post_accumulate_grad_hook(hook)
        signal = torch.ones(1)
        if rank == 1:
            dist.recv(signal, 0)  # begins only after rank 0's pass
        weight.sum().backward()
        if rank == 0:
            dist.send(signal, 1)
        futures[0].wait()
        assert_same(weight.grad, torch.full((8,), 2.0))


def test_futures_kept_beyond_a_pass(rank_pool: Any) -> None:
    rank_pool(2).run(run_futures_kept_beyond_a_pass)


def run_failing_callbacks(rank: int, world: int) -> None:
    with process_group():
        future = dist.all_reduce(values(rank, 3), async_op=True).get_future()
        failed = future.then(lambda f: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failed.wait()
        with pytest.raises(ZeroDivisionError):
            failed.value()
        with pytest.raises(ZeroDivisionError):
            failed.then(lambda f: f.value()).wait()
        assert failed.then(lambda f: "went on").wait() == "went on"


def test_failing_callbacks(rank_pool: Any) -> None:
    rank_pool(2).run(run_failing_callbacks)


def reduce_in_a_callback_of_a_lost_group(rank: int, world: int) -> None:
    dist.init_process_group("smddp")
    dist.barrier()
    if rank == 1:
        say("ready")
        time.sleep(60)
    future = dist.all_reduce(values(rank, 1000), async_op=True).get_future()
    stubborn = future.then(lambda f: dist.all_reduce(torch.ones(1)))  # does not look at f
    say("waiting")
    with pytest.raises(SdpError):
        stubborn.wait()
    dist.destroy_process_group()


def test_a_callback_does_not_wait_for_the_lost() -> None:
    with start_ranks(2, reduce_in_a_callback_of_a_lost_group) as ranks:
        assert ranks[1].heard() == "ready"
        assert ranks[0].heard() == "waiting"
        ranks[1].kill()
        ranks[0].result()
        assert ranks[0].finish() == 0


def run_futures_at_the_end(rank: int, world: int) -> None:
    """Futures that nobody will complete any more fail instead of hanging."""
    with process_group():
        future = dist.irecv(torch.empty(1), 1 - rank).get_future()
    with pytest.raises(SdpError):
        future.wait()


def test_futures_end_with_their_group(rank_pool: Any) -> None:
    rank_pool(2).run(run_futures_at_the_end)
