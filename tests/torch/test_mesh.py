"""Groups of a part of the ranks: meshes, subgroups, and other backends beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.torch.jobs import assert_same, process_group


def total_of(group: Any, rank: int) -> float:
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def run_mesh(rank: int, world: int) -> None:
    """Ranks 0..7 as 2 x 2 x 2: no dimension but the last has groups that are contiguous."""
    with process_group():
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        a, b, c = (rank >> 2) & 1, (rank >> 1) & 1, rank & 1
        assert total_of(mesh["a"].get_group(), rank) == 2 * (2 * b + c) + 4
        assert total_of(mesh["b"].get_group(), rank) == 2 * (4 * a + c) + 2
        assert total_of(mesh["c"].get_group(), rank) == 2 * (4 * a + 2 * b) + 1
        flat = mesh["a", "c"]._flatten("ac")
        assert flat.size() == 4
        assert total_of(flat.get_group(), rank) == 4 * 2 * b + 0 + 1 + 4 + 5
        for name in "abc":
            assert dist.get_backend(mesh[name].get_group()) == "smddp"
        dist.barrier()  # rank 0's store serves ranks that still make their groups


def test_mesh(rank_pool: Any) -> None:
    rank_pool(8).run(run_mesh)


def run_subgroups(rank: int, world: int) -> None:
    with process_group():
        mine, everyone = dist.new_subgroups(group_size=2)
        assert len(everyone) == world // 2
        assert total_of(mine, rank) == 2 * (rank // 2 * 2) + 1
        odd, _ = dist.new_subgroups_by_enumeration([[0, 3], [1], [2]])
        assert total_of(odd, rank) == (3 if rank in (0, 3) else rank)
        # Only the members call.
        if rank in (3, 1):
            pair = dist.new_group([3, 1], use_local_synchronization=True)
            assert total_of(pair, rank) == 4
            gathered = [torch.zeros(1) for _ in range(2)]
            dist.all_gather(gathered, torch.tensor([float(rank)]), group=pair)
            assert_same(gathered, [torch.tensor([1.0]), torch.tensor([3.0])])
        dist.destroy_process_group(odd)
        assert total_of(None, rank) == 6


def test_subgroups(rank_pool: Any) -> None:
    rank_pool(4).run(run_subgroups)


def run_concurrent(rank: int, world: int) -> None:
    """Forty operations of ten overlapping groups are in flight at once."""
    with process_group():
        members = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3], [0, 1, 2], [1, 2, 3], [0, 3, 2]]
        groups = [(m, dist.new_group(m)) for m in members] + [([0, 1, 2, 3], dist.group.WORLD)]
        mine = [(m, group) for m, group in groups if rank in m]
        if rank % 2:
            mine.reverse()  # groups of different order on different ranks do not block each other
        works = []
        for number in range(4):
            for m, group in mine:
                tensor = torch.full((1 << (4 * number),), float(rank + number))
                works.append(
                    (m, number, tensor, dist.all_reduce(tensor, group=group, async_op=True))
                )
        for m, number, tensor, work in reversed(works):
            work.wait()
            assert_same(tensor, torch.full_like(tensor, float(sum(m) + number * len(m))))


def test_many_groups_in_flight(rank_pool: Any) -> None:
    rank_pool(4).run(run_concurrent)


def run_other_backend(rank: int, world: int) -> None:
    """A mesh over gloo inside of a job over smddp, and the other way round."""
    with process_group("gloo"):
        ours = dist.new_group(backend="smddp")
        mesh = dist.device_mesh.DeviceMesh.from_group(ours, "cpu")
        assert dist.get_backend(mesh.get_group()) == "smddp"
        assert total_of(mesh.get_group(), rank) == total_of(None, rank) == 1


def test_mesh_from_a_group(rank_pool: Any) -> None:
    rank_pool(2).run(run_other_backend)


def run_split(rank: int, world: int) -> None:
    """Before 2.15, torch refuses to split groups of any backend where there is no accelerator."""
    with process_group(), pytest.raises(RuntimeError, match="No device associated"):
        dist.split_group(split_ranks=[[0], [1]])


def test_split_group_is_refused_by_torch(rank_pool: Any) -> None:
    if torch.accelerator.is_available() or torch.__version__ >= "2.15":
        pytest.skip(
            "torch splits groups where there is an accelerator, and since 2.15 those of CPUs"
        )
    rank_pool(2).run(run_split)
