"""The trace of torch's groups: their names, and whose rank a file has."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp_plugins.core import SdpError
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


def wait_in_a_ring(rank: int, world: int) -> str:
    """Each rank waits for the next in another group, all of which fail at about the same time."""
    with process_group() as whole:
        parts = [dist.new_group(pair) for pair in ([0, 1], [1, 2])]
        dist.barrier()
        group = [*parts, whole][rank]
        group.set_timeout(timedelta(seconds=2))
        with pytest.raises(SdpError) as caught:
            dist.all_reduce(torch.ones(8), group=group)
        return "\n".join(getattr(caught.value, "__notes__", [""]))


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="errors have no notes before 3.11")
def test_what_ranks_are_at_in_groups_of_others(rank_pool: Any) -> None:
    first, second, third = rank_pool(3).run(wait_in_a_ring)
    was = r"(was|has been) in all_reduce #\d float32\[8\] sum .*in group"
    assert re.search(rf"rank 1 .* {was} 2", first), first  # of which rank 0 is no member
    assert re.search(rf"rank 2 .* {was} default", second), second
    assert re.search(rf"rank 0 .* {was} 1.*\n.*rank 1 .* {was} 2", third), third


def wait_for_two_groups(rank: int, world: int) -> None:
    with process_group():
        part = dist.new_group([1, 2])
        dist.barrier()
        say("going")
        dist.barrier(part if rank == 1 else None)


def test_a_signal_tells_of_groups_of_others() -> None:
    with start_ranks(3, wait_for_two_groups) as ranks:
        for rank in ranks:
            assert rank.heard() == "going"
        until_seen(ranks, "rank 1 has waited .* in barrier #1 for rank 2", "ranks 0, 2 have waited")
        os.kill(ranks[0].pid, signal.SIGUSR1)
        other = r"rank 1 .* has been in barrier #1 for .* in group 1; its last: barrier #1"
        text = until_seen(ranks, other, read=ranks[0].output)
        assert "ended" not in text


def go_on_after_failures(rank: int, world: int) -> str:
    """Rank 1 is in no operation, long after two groups that nobody needs have failed."""
    with process_group() as whole:
        part = dist.new_group(timeout=timedelta(seconds=1))
        dist.barrier()
        if rank != 2:
            with pytest.raises(SdpError):
                dist.new_group(timeout=timedelta(seconds=0.5), use_local_synchronization=True)
            with pytest.raises(SdpError):
                dist.all_reduce(torch.ones(2), group=part)
        dist.barrier()
        whole.set_timeout(timedelta(seconds=2))
        if rank == 1:
            time.sleep(3)
        with pytest.raises(SdpError) as caught:
            twice()
        return "\n".join(getattr(caught.value, "__notes__", [""]))


def twice() -> None:
    """Who comes late may still succeed in the first."""
    dist.all_reduce(torch.ones(10))
    dist.barrier()


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="errors have no notes before 3.11")
def test_what_has_failed_before_is_not_told(rank_pool: Any) -> None:
    for note in rank_pool(3).run(go_on_after_failures)[::2]:
        assert re.search(r"rank 1 .* is in no operation; its last: barrier #2, done", note), note
