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
from tests.faults import gave_up, stay_away
from tests.flight.cases import until_seen
from tests.ranks import run_ranks, say, start_ranks
from tests.torch.jobs import meet_over_the_store, process_group

needs_notes = pytest.mark.skipif(
    not hasattr(Exception, "add_note"), reason="errors have no notes before 3.11"
)


def over_gloo(rank: int, world: int, folder: str) -> None:
    os.environ["SDP_TRACE"] = folder
    dist.init_process_group("gloo")
    pairs = [dist.new_group(pair, backend="smddp") for pair in ([0, 1], [2, 3])]
    dist.all_reduce(torch.ones(10), group=pairs[rank // 2])
    dist.barrier()  # rank 0 serves the store by which the others may still meet
    dist.destroy_process_group()


def about(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["otherData"]
    return found


def test_a_job_over_gloo_with_pairs_over_smddp(tmp_path: Path) -> None:
    run_ranks(4, over_gloo, str(tmp_path))
    for rank in range(4):
        found = about(tmp_path / f"rank-{rank:05d}.json")
        assert (found["rank"], found["world_size"]) == (rank, 4)
        ((label, seat),) = found["groups"].items()
        assert label not in ("default", "0")
        assert seat["members"] == [rank // 2 * 2, rank // 2 * 2 + 1]


def over_smddp(rank: int, world: int, folder: str) -> None:
    os.environ["SDP_TRACE"] = folder
    dist.init_process_group("smddp")
    dist.all_reduce(torch.ones(10))
    future = dist.all_reduce(torch.ones(10), async_op=True).get_future()
    future.then(lambda _: dist.all_reduce(torch.ones(10))).wait()
    dist.destroy_process_group()


def test_the_default_group_is_called_so(tmp_path: Path) -> None:
    run_ranks(2, over_smddp, str(tmp_path))
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
        head = r"group 2, which is being made \(ranks 0-2\):\n"
        wait = r"  ranks 0, 2 have waited .* for rank 1\n"
        named = r"group 1 mine \(ranks 0-2\):\n  nobody waits; its last: barrier #1"
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
        meet_over_the_store(rank, world)  # a group that is closed shows nothing
        return "\n".join(getattr(caught.value, "__notes__", [""]))


@needs_notes
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
        part = dist.new_group()
        part.set_timeout(timedelta(seconds=1))
        dist.barrier()
        if rank != 2:
            with pytest.raises(SdpError):
                dist.new_group(timeout=timedelta(seconds=0.5), use_local_synchronization=True)
            with pytest.raises(SdpError):
                dist.all_reduce(torch.ones(2), group=part)
        dist.barrier()
        whole.set_timeout(timedelta(seconds=2))
        if rank == 1:
            stay_away(2, world)
        with pytest.raises(SdpError) as caught:
            twice()
        if rank != 1:
            gave_up()
        return "\n".join(getattr(caught.value, "__notes__", [""]))


def twice() -> None:
    """Who comes late may still succeed in the first."""
    dist.all_reduce(torch.ones(10))
    dist.barrier()


@needs_notes
def test_what_has_failed_before_is_not_told(rank_pool: Any) -> None:
    for note in rank_pool(3).run(go_on_after_failures)[::2]:
        assert re.search(r"rank 1 .* is in no operation; its last: barrier #2, done", note), note


def time_out_in_a_part(rank: int, world: int, init: str, launched_as: list[int]) -> str:
    """Ranks 1 and 3 have a group, to which 3 does not come; the launcher numbers other things."""
    for name in ("RANK", "LOCAL_RANK", "SDP_RANK", "OMPI_COMM_WORLD_RANK"):
        os.environ.pop(name, None)
    if launched_as:
        os.environ.update(RANK=str(launched_as[rank]), WORLD_SIZE="3")
    with process_group(init_method=init, rank=rank, world_size=world):
        part = dist.new_group([1, 3], group_desc="tp\n]row")
        if rank != 1:
            stay_away(1, world)
            return ""
        part.set_timeout(timedelta(seconds=1))
        with pytest.raises(SdpError) as caught:
            dist.all_reduce(torch.ones(2), group=part)
        gave_up()
        return "\n".join([str(caught.value), *caught.value.__notes__])


@needs_notes
@pytest.mark.parametrize("launched_as", [[], [0, 1, 1, 2], [0, 0, 1, 1]])
def test_ranks_are_torch_s_where_the_launcher_s_are_others(
    tmp_path: Path, launched_as: list[int]
) -> None:
    init = f"file://{tmp_path / 'meet'}"
    _, text, *_ = run_ranks(4, time_out_in_a_part, init, launched_as)
    first, _, notes = text.partition("\n")
    assert first.startswith("[rank 1 in group 1 tp?]row (ranks 1, 3)] all_reduce #1 "), first
    assert "rank 3 did not arrive" in first
    assert re.search(r"rank 1 has waited .* for rank 3\n.*rank 3 .* is in no operation", notes)


def forget_new_group(rank: int, world: int) -> str:
    with process_group():
        dist.barrier()
        if rank != 1:
            stay_away(1, world)
            return ""
        with pytest.raises(SdpError) as caught:
            dist.new_group([1, 3], timeout=timedelta(seconds=1))
        gave_up()
        return "\n".join([str(caught.value), *caught.value.__notes__])


@needs_notes
def test_a_member_that_does_not_come_to_new_group(rank_pool: Any) -> None:
    text = rank_pool(4).run(forget_new_group)[1]
    head = r"\[rank 1 in group 1 \(ranks 1, 3\)\] rendezvous: rank 3 did not arrive in 1 s"
    title = r"group 1, which is being made \(ranks 1, 3\):"
    wait = r"  rank 1 has waited .* for rank 3\n    rank 3 \(pid .*\) is in no operation"
    assert re.search(rf"^{head}(.*\n)+{title}\n{wait}", text), text


def wait_through_two_groups(rank: int, world: int) -> str:
    """Ranks 0 and 2 wait for rank 1, which waits for rank 3 in another group."""
    with process_group() as whole:
        part = dist.new_group([1, 3], timeout=timedelta(seconds=60), group_desc="dp")
        dist.barrier()
        whole.set_timeout(timedelta(seconds=2))
        if rank == 3:
            stay_away(2, 3)  # rank 1 waits for longer
            return ""
        with pytest.raises(SdpError) as caught:
            dist.all_reduce(torch.ones(2), group=part if rank == 1 else None)
        if rank != 1:
            gave_up()
        return "\n".join([str(caught.value), *caught.value.__notes__])


@needs_notes
def test_a_wait_is_followed_into_another_group() -> None:
    text = run_ranks(4, wait_through_two_groups)[0]
    there = r"group 1 dp \(ranks 1, 3\):\n  rank 1 has waited .* in all_reduce #1 .* for rank 3\n"
    assert re.search(there, text), text


def wait_shortly(rank: int, world: int) -> str:
    with process_group():
        if rank == 1:
            dist.barrier()
            time.sleep(1)
            dist.all_reduce(torch.ones(2))
            return ""
        dist.barrier()
        work = dist.all_reduce(torch.ones(2), async_op=True)
        with pytest.raises(SdpError) as caught:
            work.wait(timedelta(seconds=0.3))
        work.wait()
        return "\n".join([str(caught.value), *caught.value.__notes__])


@needs_notes
def test_a_wait_that_ends_before_its_operation_tells_for_whom(rank_pool: Any) -> None:
    text = rank_pool(2).run(wait_shortly)[0]
    assert re.match(r"\[rank 0/2\] all_reduce: not done after a wait of 0\.3 s", text), text
    assert re.search(r"rank 0 has waited .* in all_reduce #2 float32\[2\] sum for rank 1\n", text)


def send_and_wait(rank: int, world: int) -> None:
    with process_group():
        part = dist.new_group()
        if rank == 0:
            dist.send(torch.ones(4), 1, group=part)
            dist.isend(torch.ones(4), 1, group=part, tag=5)
        else:
            dist.recv(torch.ones(4), 0, group=part)
            dist.recv(torch.ones(4), 0, group=part, tag=6)
        time.sleep(60)


def test_messages_are_something_done() -> None:
    with start_ranks(2, send_and_wait) as ranks:
        wait = r"rank 1 has waited .* in recv #2 float32\[4\] from rank 0 tag 6\n"
        last = r"rank 0 .* is in no operation; its last: send #2 float32\[4\] to rank 1 tag 5, done"
        until_seen(ranks, wait + ".*" + last)
