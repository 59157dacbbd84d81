"""torch's reconfigure and shrink_group: ranks go on without a lost one, and with a new one."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sdp_plugins.core import PeerLostError, RendezvousError, RendezvousTimeoutError, SdpError
from sdp_plugins.torch.groups import smddp_group
from sdp_plugins.torch.internals import TAKES_BACKENDS
from tests.ranks import HANG_S, start_ranks
from tests.torch.jobs import assert_same, process_group, total, values

pytestmark = pytest.mark.skipif(
    not TAKES_BACKENDS, reason="torch has reconfigure and shrink_group since 2.14"
)
LIMIT = timedelta(seconds=60)
SHORT = timedelta(seconds=1)  # expires
newer: Any = dist  # with names that the oldest torch lacks


def told_by_all(folder: str, rank: int, count: int, text: str) -> list[str]:
    """What `count` ranks tell each other out of band, by rank: as files."""
    place = Path(folder)
    place.mkdir(exist_ok=True)
    (place / f"new-{rank}").write_text(text)
    (place / f"new-{rank}").rename(place / f"told-{rank}")
    end = time.monotonic() + HANG_S
    while len(found := sorted(place.glob("told-*"))) < count:
        assert time.monotonic() < end
        time.sleep(0.01)
    return [each.read_text() for each in found]


def reduce(expected: float) -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert_same(tensor, torch.full((3,), float(expected)))


def train_and_split(world: int) -> None:
    """What needs the store, and groups that the default one makes."""
    assert (dist.get_world_size(), newer.group.WORLD.size()) == (world, world)
    assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(world))
    model = DistributedDataParallel(nn.Linear(600, 600))
    for _ in range(3):
        model(torch.ones(2, 600)).sum().backward()
    assert smddp_group().last_path == "zero-copy"
    part = dist.new_group([0, world - 1])
    if dist.get_rank() in (0, world - 1):
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=part)
        assert tensor.item() == 2
    seen: list[Any] = [None] * world
    dist.all_gather_object(seen, dist.get_rank())
    assert seen == list(range(world))


def lose_one_let_one_in(rank: int, world: int, folder: str, lost: int) -> int:
    """Ranks 0 to 2 begin, one of them is lost, and the last one joins; the rank at the end."""
    if rank == world - 1:
        dist.init_process_group(
            "smddp", store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True
        )
        assert newer._supports_reconfigure()
        with pytest.raises(SdpError, match=r"call reconfigure\(\)"):
            dist.all_reduce(torch.ones(1))
    else:
        store = dist.FileStore(f"{folder}/store", world - 1)
        dist.init_process_group("smddp", store=store, rank=rank, world_size=world - 1)
        group = dist.group.WORLD
        reduce(3)
        if rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError):
            dist.all_reduce(torch.ones(1))
        mine = newer._get_reconfigure_handle()
        handles = told_by_all(f"{folder}/left", rank, 2, mine)
        newer._reconfigure(uuid=7, handles=handles, timeout=LIMIT).wait()
        assert dist.group.WORLD is group
        reduce(2)
    mine = newer._get_reconfigure_handle()
    handles = told_by_all(f"{folder}/all", rank, 3, mine)[::-1]
    newer._reconfigure(uuid=8, handles=handles, timeout=LIMIT).wait()
    assert handles[dist.get_rank()] == mine
    reduce(3)
    train_and_split(3)
    at_the_end = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    return at_the_end


@pytest.mark.parametrize("lost", [0, 1])
def test_ranks_go_on_without_one_and_with_another(tmp_path: Path, lost: int) -> None:
    with start_ranks(4, lose_one_let_one_in, str(tmp_path), lost) as ranks:
        left = [rank for rank in range(4) if rank != lost]
        assert [ranks[rank].result(HANG_S) for rank in left] == [2, 1, 0]


def disagree(rank: int, world: int, folder: str) -> None:
    with process_group():
        mine = newer._get_reconfigure_handle()
        handles = told_by_all(folder, rank, world, mine)
        with pytest.raises(ValueError, match="not among them"):
            newer._reconfigure(uuid=1, handles=[handles[1 - rank]])
        reduce(world)
        with pytest.raises(RendezvousError, match="different uuids"):
            newer._reconfigure(uuid=rank, handles=handles)
        newer._reconfigure(uuid=5, handles={*handles}).wait()
        reduce(world)
        dist.barrier()


def test_what_cannot_be_a_group_is_refused(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(disagree, str(tmp_path))


def wait_for_one_that_is_lost(rank: int, world: int, folder: str) -> None:
    dist.init_process_group(
        "smddp", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3
    )
    reduce(3)
    mine = newer._get_reconfigure_handle()
    handles = told_by_all(f"{folder}/all", rank, 3, mine)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(RendezvousTimeoutError, match="the job needs 3"):
        newer._reconfigure(uuid=1, handles=handles, timeout=SHORT)
    with pytest.raises(SdpError):
        dist.all_reduce(torch.ones(1))
    newer._reconfigure(uuid=2, handles=handles[1:], timeout=LIMIT)
    reduce(2)
    dist.barrier()
    dist.destroy_process_group()


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    with start_ranks(3, wait_for_one_that_is_lost, str(tmp_path)) as ranks:
        for rank in (1, 2):
            ranks[rank].result(HANG_S)


def shrink(rank: int, world: int, abort: bool) -> None:
    dist.init_process_group("smddp", timeout=LIMIT)
    reduce(3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        dist.all_reduce(torch.ones(1))
    flags = dist.distributed_c10d.SHRINK_ABORT if abort else 0
    left = dist.shrink_group([1], shrink_flags=flags)
    assert left is dist.group.WORLD
    assert (left.rank(), left.size()) == (rank // 2, 2)
    tensor = values(rank // 2, 9)
    dist.all_reduce(tensor)
    assert_same(tensor, total(2, 9))
    assert smddp_group() is not None
    dist.barrier()
    with suppress(dist.DistError):
        dist.destroy_process_group()


@pytest.mark.parametrize("abort", [False, True])
def test_shrink_group(abort: bool) -> None:
    with start_ranks(3, shrink, abort) as ranks:
        for rank in (0, 2):
            ranks[rank].result(HANG_S)
