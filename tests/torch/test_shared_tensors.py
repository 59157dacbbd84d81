"""Tensors that a program shares by itself."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp_plugins.torch import share
from tests.ranks import HANG_S
from tests.torch.jobs import assert_same, process_group, total, values
from tests.torch.test_bucket_registration import BIG, bucket_files, is_shared, reduce


def run_share(rank: int, world: int) -> None:
    with process_group() as group:
        tensor = torch.full((BIG,), 3.0)
        view, other = tensor[10:20], tensor.view(2, -1)
        assert reduce(tensor, rank, world) == "staged"
        share(tensor)
        share(tensor, group)  # a second time changes nothing
        assert len(group._registrations._sightings) == 1
        assert_same(tensor, total(world, BIG))
        for _ in range(3):
            assert reduce(tensor, rank, world) == "zero-copy"
        assert is_shared(view)
        assert_same(view, tensor[10:20])
        other.fill_(7.0)
        assert tensor.sum() == 7 * BIG  # all views moved along
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert group.last_path == "zero-copy"
        assert_same(tensor, torch.full((BIG,), 7.0 * world))
        assert reduce(tensor[BIG // 2 :], rank, world) == "zero-copy"  # a part of it

        small = torch.empty(1000)
        share(small)
        assert {reduce(small, rank, world) for _ in range(3)} <= {"staged", "inline"}
        assert not is_shared(small)


@pytest.mark.parametrize("world", [2, 3])
def test_share(rank_pool: Any, world: int) -> None:
    rank_pool(world).run(run_share)


def run_share_in_threads(rank: int, world: int) -> None:
    """Threads with one storage and two groups: it moves once."""
    with process_group() as first:
        second = dist.new_group()
        for _ in range(5):
            tensor = torch.empty(BIG)
            before = set(bucket_files())
            start = threading.Barrier(4)

            def both(group: Any, shared: Any = tensor, start: Any = start) -> None:
                start.wait(HANG_S)
                share(shared, group)

            groups = (first, second, first, second)
            threads = [threading.Thread(target=both, args=(group,)) for group in groups]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(HANG_S)
            assert len(set(bucket_files()) - before) == 1
            for group in (first, second):
                assert len(group._registrations._sightings) == 1
                tensor.copy_(values(rank, BIG))
                dist.all_reduce(tensor, group=group)
                assert_same(tensor, total(world, BIG))
                assert group.last_path == "zero-copy"


def test_threads_move_a_storage_once(rank_pool: Any) -> None:
    rank_pool(2).run(run_share_in_threads)


def run_refused(rank: int, world: int) -> None:
    with process_group():
        for group in (dist.new_group(backend="gloo"), "world"):
            with pytest.raises(ValueError, match=r"needs a group of smddp.*Hint"):
                share(torch.empty(BIG), group)
        with pytest.raises(ValueError, match=r"not contiguous.*Hint"):
            share(torch.empty(2, BIG).t())
        with pytest.raises(ValueError, match=r"on meta"):
            share(torch.empty(BIG, device="meta"))
    with pytest.raises(ValueError, match="init_process_group"):
        share(torch.empty(BIG))


def test_share_says_what_it_cannot_do(rank_pool: Any) -> None:
    rank_pool(2).run(run_refused)
