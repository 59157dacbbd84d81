"""Memory that the ranks of a node map: what one writes, the others read."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import Group, _native
from tests.core.test_groups import shared_mappings
from tests.internode.spanning import LAYOUTS, spanning_group
from tests.leaks import no_leaks
from tests.ranks import Pool


def numbers(memory: memoryview) -> Any:
    return np.frombuffer(memory, np.int64)


def share(rank: int, world: int) -> list[int]:
    with Group.from_env(timeout_s=30) as group, no_leaks():
        before = shared_mappings()
        memories = [numbers(memory) for memory in group.allocate_on_node(8 * (rank + 1))]
        assert [memory.size for memory in memories] == [1, 2, 3]
        memories[rank][:] = rank + 1
        group.barrier()
        found = [int(memory.sum()) for memory in memories]
        group.all_reduce(memories[rank][:1])  # is registered
        shared = group.allocate_on_node(0 if rank else 800)
        assert [memory.nbytes for memory in shared] == [800, 0, 0]
        numbers(shared[0])[rank] = rank + 10
        group.barrier()
        found += numbers(shared[0])[:3].tolist()
        del memories, shared
        gc.collect()
        group.barrier()
        group.barrier()
        assert shared_mappings() == before
    return found


def test_ranks_of_a_node_share_memory(rank_pool: Pool) -> None:
    assert rank_pool(3).run(share) == [[1, 4, 9, 10, 11, 12]] * 3


def keep(rank: int, world: int) -> int:
    with Group.from_env(timeout_s=30) as group:
        memory = group.allocate_on_node(0 if rank else 8)[0]
        if rank == 0:
            numbers(memory)[0] = 7
            del memory
        group.barrier()
    del group
    gc.collect()
    return 7 if rank == 0 else int(numbers(memory)[0])


def test_it_outlives_the_group_and_who_allocated_it(rank_pool: Pool) -> None:
    assert rank_pool(2).run(keep) == [7, 7]


def view(rank: int, world: int) -> None:
    with Group.from_env(timeout_s=30) as group, no_leaks():
        before = shared_mappings()
        n = 10_000
        memory, view = map(numbers, group.allocate_with_view(8 * n))
        address, page = view.ctypes.data, mmap.PAGESIZE
        share = slice(rank * n // world, (rank + 1) * n // world)
        memory[share] = rank
        group.barrier()
        assert view.sum() == n // world * sum(range(world))
        group.barrier()
        view[0] = 7 + rank  # on all ranks, each for itself
        group.barrier()
        assert (view[0], memory[0]) == (7 + rank, 0)
        assert _native.written_pages(address, view.nbytes) == [(0, page)]
        _native.drop_pages(address, page)
        assert not _native.written_pages(address, view.nbytes)
        assert view[0] == 0
        del memory
        gc.collect()
        group.barrier()
        assert view[-1] == world - 1  # keeps the memory
        del view
        gc.collect()
        group.barrier()
        group.barrier()
        assert shared_mappings() == before


def test_a_view_keeps_writes_to_itself(rank_pool: Pool) -> None:
    rank_pool(2).run(view)


def share_on_nodes(rank: int, world: int, layout: str, root: str) -> list[int]:
    group = spanning_group(layout, root)
    memories = group.allocate_on_node(8)
    numbers(memories[group.local_rank])[0] = rank
    group.barrier()
    memory, view = map(numbers, group.allocate_with_view(8))
    if group.local_rank == 0:
        memory[0] = rank
    group.barrier()
    assert view[0] == group.nodes.members[group.node_rank][0]
    return [int(numbers(memory)[0]) for memory in memories]


@pytest.mark.parametrize("layout", ["2x2", "interleaved", "1+2"])
def test_each_node_has_its_own(rank_pool: Pool, tmp_path: Any, layout: str) -> None:
    nodes = LAYOUTS[layout]
    members = [[r for r, n in enumerate(nodes) if n == node] for node in nodes]
    assert rank_pool(len(nodes)).run(share_on_nodes, layout, str(tmp_path)) == members
