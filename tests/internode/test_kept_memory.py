"""Memory of a failed operation between nodes is kept while messages may still use it."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from sdp_plugins.core import CollectiveTimeoutError, Group, SdpError
from sdp_plugins.core import _native as native
from sdp_plugins.core.internode import gathers
from sdp_plugins.torch.gloo_channel import GlooChannel
from tests.internode.spanning import meet
from tests.ranks import Start

LIMIT_S = 1.0
WAIT_S = 60.0
"""Of a caller that would wait for ever."""


class Array(np.ndarray):
    """Can be watched by a weak reference."""


def array(count: int) -> Array:
    return np.ones(count, np.float32).view(Array)


def time_out_in(what: str, group: Group) -> list[weakref.ref[Any]]:
    """Rank 0 waits in vain; returns what remembers the memory of that operation."""
    data = array(500_000)
    seen = [weakref.ref(data)]
    calls: dict[str, Callable[[], Any]] = {
        "blocking": lambda: group.all_reduce(data),
        "average": lambda: group.all_reduce(data, "avg"),
        "asynchronous": lambda: group.all_reduce(data, async_op=True),
        "receive": lambda: group.recv(data, 1),
        "asynchronous receive": lambda: group.recv(data, 1, async_op=True),
    }
    try:
        work = calls[what]()
        if work is not None:
            work.wait()
    except CollectiveTimeoutError:
        pools = group.issuer.endpoint._context.pools  # type: ignore[union-attr]
        return seen + [weakref.ref(pool) for pool in pools.values()]
    raise AssertionError("it worked")


@contextmanager
def messages_that_stay(stay: bool) -> Iterator[None]:
    """Have this rank find that messages are still on their way, as over MPI."""
    abandon = GlooChannel.abandon

    def pretend(channel: GlooChannel, pending: Any) -> bool:
        return abandon(channel, pending) or stay

    with mock.patch.object(GlooChannel, "abandon", pretend):
        yield


def memory_after_a_time_out(
    rank: int, world: int, root: str, what: str, stay: bool, close: bool
) -> list[bool]:
    """Whether an operation's memory is still there when nobody else knows of it."""
    group = meet("2x1", root, "g")
    group.all_reduce(array(500_000))
    group.timeout_s = LIMIT_S
    if rank == 1:
        time.sleep(WAIT_S)
        group.close()
        return []
    with messages_that_stay(stay):
        seen = time_out_in(what, group)
        if close:
            group.close()
        del group
    gc.collect()
    return [ref() is not None for ref in seen]


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize(
    "what", ["blocking", "average", "asynchronous", "receive", "asynchronous receive"]
)
def test_memory_that_messages_may_still_use_is_kept(
    start_pooled: Start, tmp_path: Path, what: str, close: bool
) -> None:
    with start_pooled(2, memory_after_a_time_out, str(tmp_path), what, True, close) as ranks:
        buffer, *pools = ranks[0].result(WAIT_S)
        assert buffer
        assert "receive" in what or (pools and all(pools))


@pytest.mark.parametrize("what", ["blocking", "asynchronous", "receive"])
def test_other_memory_is_not(start_pooled: Start, tmp_path: Path, what: str) -> None:
    with start_pooled(2, memory_after_a_time_out, str(tmp_path), what, False, True) as ranks:
        assert not any(ranks[0].result(WAIT_S))


def forget_an_operation(rank: int, world: int, root: str) -> bool:
    """Nobody waits for it, and nobody closes the group."""
    group = meet("2x1", root, "g")
    group.all_reduce(array(500_000))
    if rank == 1:
        time.sleep(WAIT_S)
        group.close()
        return True
    data = array(500_000)
    seen = weakref.ref(data)
    group.all_reduce(data, async_op=True)
    del data
    time.sleep(0.5)
    with messages_that_stay(True):
        del group
    gc.collect()
    return seen() is not None


def test_memory_of_an_operation_that_nobody_waits_for_is_kept(
    start_pooled: Start, tmp_path: Path
) -> None:
    with start_pooled(2, forget_an_operation, str(tmp_path)) as ranks:
        assert ranks[0].result(WAIT_S)


def wait_for_sizes(rank: int, world: int, root: str) -> list[bool]:
    """Rank 1 stalls before it tells its sizes: rank 0 receives into memory of `_compare_sizes`."""
    group = meet("2x1", root, "g")
    group.timeout_s = LIMIT_S
    seen: list[weakref.ref[Any]] = []
    address = native.address

    def watched(memory: Any) -> int:
        if isinstance(memory, np.ndarray):
            seen.append(weakref.ref(memory))
        return address(memory)

    outputs = [np.ones(5) for _ in range(world)]
    stall = mock.Mock(side_effect=lambda *args, **options: time.sleep(WAIT_S))
    with mock.patch.object(gathers, "_compare_sizes", stall) if rank else messages_that_stay(True):
        try:
            with mock.patch.object(native, "address", watched):
                group.all_gather_uneven(outputs, np.ones(5))
        except SdpError:
            pass
        group.close()
    del group
    gc.collect()
    return [ref() is not None for ref in seen]


def test_memory_of_the_steps_of_an_operation_is_kept(start_pooled: Start, tmp_path: Path) -> None:
    with start_pooled(2, wait_for_sizes, str(tmp_path)) as ranks:
        found = ranks[0].result(WAIT_S)
        assert found
        assert all(found)


def fail_without_a_collector(rank: int, world: int, root: str) -> bool:
    group = meet("2x1", root, "g")
    group.all_reduce(array(5))
    group.timeout_s = LIMIT_S
    if rank == 1:
        time.sleep(WAIT_S)
        group.close()
        return False
    context = weakref.ref(group.issuer.endpoint._context)  # type: ignore[union-attr]
    gc.collect()
    gc.disable()
    try:
        with suppress(CollectiveTimeoutError):
            group.all_reduce(array(5))
        group.close()
        del group
        end = time.monotonic() + WAIT_S / 2
        while context() is not None and time.monotonic() < end:
            time.sleep(0.01)  # the engine's thread drops its last reference as it ends
        return context() is None
    finally:
        gc.enable()


def test_a_failed_group_is_freed_without_the_garbage_collector(
    start_pooled: Start, tmp_path: Path
) -> None:
    with start_pooled(2, fail_without_a_collector, str(tmp_path)) as ranks:
        assert ranks[0].result(WAIT_S)
