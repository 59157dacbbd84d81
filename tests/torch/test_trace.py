"""The trace of torch's groups: their names, and whose rank a file has."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.core.flight_cases import until_seen
from tests.ranks import run_ranks, say, start_ranks
from tests.torch.jobs import process_group


def over_gloo(rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    pairs = [dist.new_group(pair, backend="smddp") for pair in ([0, 1], [2, 3])]
    dist.all_reduce(torch.ones(10), group=pairs[rank // 2])
    dist.barrier()  # rank 0 serves the store by which the others may still meet
    dist.destroy_process_group()


def about(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["otherData"]
    return found


def test_a_job_over_gloo_with_pairs_over_smddp(tmp_path: Path) -> None:
    run_ranks(4, over_gloo, env={"SDP_TRACE": str(tmp_path)})
    for rank in range(4):
        found = about(tmp_path / f"rank-{rank:05d}.json")
        assert (found["rank"], found["world_size"]) == (rank, 4)
        ((label, seat),) = found["groups"].items()
        assert label not in ("default", "0")
        assert seat["members"] == [rank // 2 * 2, rank // 2 * 2 + 1]


def over_smddp(rank: int, world: int) -> None:
    dist.init_process_group("smddp")
    dist.all_reduce(torch.ones(10))
    future = dist.all_reduce(torch.ones(10), async_op=True).get_future()
    future.then(lambda _: dist.all_reduce(torch.ones(10))).wait()
    dist.destroy_process_group()


def test_the_default_group_is_called_so(tmp_path: Path) -> None:
    run_ranks(2, over_smddp, env={"SDP_TRACE": str(tmp_path)})
    for rank in range(2):
        groups = about(tmp_path / f"rank-{rank:05d}.json")["groups"]
        assert [*groups] == ["default", "default, callbacks"]


def come_late(rank: int, world: int) -> None:
    with process_group():
        dist.all_reduce(torch.ones(3))
        part = dist.new_group(group_desc="mine")
        dist.barrier(part)
        if rank == 1:
            say("away")
            time.sleep(60)
        dist.new_group()


def test_a_rank_that_does_not_come_to_new_group() -> None:
    with start_ranks(3, come_late) as ranks:
        assert ranks[1].heard() == "away"
        head = r"group 2, which is being made \(3 ranks\):\n"
        wait = r"  ranks 0, 2 have waited .* for rank 1\n"
        named = r"group 1 mine \(3 ranks\):\n  nobody waits; its last: barrier #1"
        until_seen(
            ranks,
            named,
            head + wait + r"    rank 1 .* is in no operation; its last: all_reduce #1 ",
        )
