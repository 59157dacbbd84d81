"""all_reduce_at_flags; the device is the test. tests/cpp/test_device_flags.cpp has the endings."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from sdp_plugins.core import CollectiveTimeoutError, Group, ReduceOp, SdpError
from sdp_plugins.core.buffers import as_buffer
from tests.core.kept_group import kept_group
from tests.internode.spanning import meet
from tests.ranks import Pool, run_ranks


class Flags:
    """Two words, as a device and the host would share them."""

    def __init__(self) -> None:
        self.words = np.zeros(2, np.uint32)
        self.ready, self.done = self.words[:1], self.words[1:]

    def at(self, value: int) -> tuple[int, int, int]:
        return self.ready.ctypes.data, self.done.ctypes.data, value


def sums(rank: int, world: int) -> None:
    group, flags = kept_group(), Flags()
    buffers = [np.zeros(5000, np.float32) for _ in range(3)]
    works = [
        group.all_reduce_at_flags([as_buffer(buffer)], ReduceOp.AVG, [flags.at(value)])
        for value, buffer in enumerate(buffers, 1)
    ]
    for value, (buffer, work) in enumerate(zip(buffers, works, strict=True), 1):
        time.sleep(0.01)
        assert not work.is_completed() and flags.done[0] == value - 1
        buffer[:] = value * rank
        flags.ready[0] = value
        while flags.done[0] != value:
            time.sleep(0.001)
        assert (buffer == value * (world - 1) / 2).all()
        work.wait()


def test_sums_start_and_end_at_their_flags(rank_pool: Pool) -> None:
    rank_pool(2).run(sums)


def test_a_device_that_does_not_come_fails_the_group() -> None:
    flags, buffer = Flags(), np.zeros(10, np.float32)
    with Group.from_env() as group:
        work = group.all_reduce_at_flags([as_buffer(buffer)], ReduceOp.SUM, [flags.at(1)], 0.1)
        while group.failure is None:
            time.sleep(0.001)
        assert not work.is_completed()
        buffer[:], flags.ready[0] = 1, 1  # the device arrives late
        with pytest.raises(CollectiveTimeoutError, match="rank 0's device has not") as caught:
            work.wait()
        assert caught.value.ranks == (0,)
        assert flags.done[0] == 1 and np.isnan(buffer).all()


def test_closing_lets_the_device_go_on() -> None:
    flags, buffer = Flags(), np.zeros(10, np.float32)
    with Group.from_env() as group:
        work = group.all_reduce_at_flags([as_buffer(buffer)], ReduceOp.SUM, [flags.at(1)])
    assert flags.done[0] == 1 and np.isnan(buffer).all()
    with pytest.raises(SdpError, match="closed"):
        work.wait()


def test_wrong_flags_are_refused() -> None:
    buffer = as_buffer(np.zeros(10, np.float32))
    with Group.from_env() as group:
        for wrong in ((0, 8, 1), (8, 3, 1)):
            with pytest.raises(ValueError, match="aligned 32-bit word"):
                group.all_reduce_at_flags([buffer], ReduceOp.SUM, [wrong])
        with pytest.raises(TypeError):
            group.all_reduce_at_flags([buffer], ReduceOp.SUM, [(8, 8, 2**32)])
        with pytest.raises(ValueError, match="1 pieces of memory, but flags of 0"):
            group.all_reduce_at_flags([buffer], ReduceOp.SUM, [])
        group.barrier()


def across_nodes(rank: int, world: int, root: str) -> None:
    with meet("2x1", root, "flags") as group:
        buffer = as_buffer(np.zeros(10, np.float32))
        with pytest.raises(NotImplementedError, match="spans several nodes"):
            group.all_reduce_at_flags([buffer], ReduceOp.SUM, [Flags().at(1)])
        group.barrier()


def test_across_nodes_they_are_refused(tmp_path: Path) -> None:
    run_ranks(2, across_nodes, str(tmp_path))
