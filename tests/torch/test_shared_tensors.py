"""Tensors that a program shares by itself."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp_plugins.torch import share
from tests.ranks import HANG_S
from tests.torch.jobs import (
    BIG,
    assert_same,
    is_shared,
    process_group,
    reduce,
    total,
    values,
)


def open_buckets() -> int:
    """Descriptors of buckets that this process holds."""
    return len(bucket_files())


def bucket_files() -> list[int]:
    """The file behind each of these descriptors."""
    files = []
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        with suppress(FileNotFoundError):
            if "sdp-bucket" in os.readlink(path):
                files.append(os.stat(path).st_ino)
    return files


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


def run_death(rank: int, world: int) -> None:
    """Registrations end with their storage; the address may mean something else at once."""
    with process_group() as group:
        registrations, before = group._registrations, open_buckets()
        reused = 0
        for n in range(12):
            tensor = torch.empty(BIG + n % 3)
            share(tensor)
            for _ in range(3):
                reduce(tensor, rank, world)
            assert group.last_path == "zero-copy"
            assert len(registrations._sightings) == 1
            pointer, count = tensor.data_ptr(), tensor.numel()
            del tensor
            assert not registrations._sightings
            assert len(registrations.dead) == 1
            fresh = torch.empty(count).share_memory_()  # a new mapping, mostly at the old address
            reused += fresh.data_ptr() == pointer
            assert reduce(fresh, rank, world) == "staged"
            assert not registrations.dead
            del fresh
        assert reused
        gc.collect()
        assert open_buckets() == before


def test_registrations_end_with_their_storage(rank_pool: Any) -> None:
    rank_pool(2).run(run_death)


def run_two_groups(rank: int, world: int) -> None:
    """One storage, registered with two groups."""
    with process_group() as first:
        second = dist.new_group()
        tensor = torch.empty(BIG)
        for group in (first, second):
            share(tensor, group)
        for _ in range(3):
            for group in (first, second):
                tensor.copy_(values(rank, BIG))
                dist.all_reduce(tensor, group=group)
                assert_same(tensor, total(world, BIG))
        assert first.last_path == second.last_path == "zero-copy"
        dist.destroy_process_group(second)
        assert reduce(tensor, rank, world) == "zero-copy"


def test_two_groups_register_one_storage(rank_pool: Any) -> None:
    rank_pool(2).run(run_two_groups)


def run_one_sided(rank: int, world: int) -> None:
    """Only one rank's tensor is shared: all fall back together."""
    with process_group():
        kept = torch.empty(BIG)
        if rank == 0:
            share(kept)
        for _ in range(4):
            tensor = kept if rank == 0 else torch.empty(BIG)
            assert reduce(tensor, rank, world) == "staged"


def test_one_rank_alone_registers_in_vain(rank_pool: Any) -> None:
    rank_pool(2).run(run_one_sided)


def run_swapped(rank: int, world: int) -> None:
    """Somebody replaces the registered memory: the registration is withdrawn."""
    with process_group() as group:
        tensor = torch.empty(BIG)
        share(tensor)
        assert reduce(tensor, rank, world) == "zero-copy"
        tensor.untyped_storage()._swap_data_ptr_(torch.zeros(BIG).untyped_storage())
        assert reduce(tensor, rank, world) == "staged"
        assert not group._registrations._sightings
        share(tensor)
        assert reduce(tensor, rank, world) == "zero-copy"


def test_replaced_memory_is_noticed(rank_pool: Any) -> None:
    rank_pool(2).run(run_swapped)


def run_refused(rank: int, world: int) -> None:
    with process_group():
        other = dist.new_group(backend="gloo")
        dist.barrier(other)  # gloo fails in a rank that still connects to one that leaves
        for group in (other, "world"):
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
