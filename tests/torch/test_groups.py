"""Several groups, groups beside gloo, and the ends of groups in any order."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sdp_plugins.core import SdpError
from tests.leaks import no_leaks
from tests.ranks import HANG_S, free_port
from tests.torch.jobs import assert_same, process_group, total, values


def reduce(rank: int, world: int, group: Any = None) -> None:
    """`rank` and `world` are those of the group."""
    tensor = values(rank, 50)
    dist.all_reduce(tensor, group=group)
    assert_same(tensor, total(world, 50))


def run_time_outs(rank: int, world: int, setting: str | None, expected_s: float) -> None:
    with mock.patch.dict(os.environ, {"SDP_TIMEOUT_S": setting or ""}), process_group() as group:
        assert group.options._timeout == timedelta(seconds=expected_s)
        given = dist.new_group(timeout=timedelta(seconds=7))
        assert given.options._timeout == timedelta(seconds=7)


@pytest.mark.parametrize(("setting", "expected_s"), [(None, 1800), ("45", 45)])
def test_who_sets_the_time_out(rank_pool: Any, setting: str | None, expected_s: float) -> None:
    """What the script gives; else SDP_TIMEOUT_S; else torch's default."""
    rank_pool(2).run(run_time_outs, setting, expected_s)


def run_names(rank: int, world: int) -> None:
    with process_group() as group:
        assert dist.get_backend() == "smddp"
        assert dist.get_rank() == group.rank() == rank
        assert dist.get_world_size() == group.size() == world
        assert group.name() == "smddp"
        assert group.group_name == "0"
        assert group.group_desc == "default_pg"
        named = dist.new_group(group_desc="mine")
        assert named.group_desc == "mine"
        assert named.group_name != group.group_name
        assert group.options._timeout == timedelta(minutes=30)
        group.set_timeout(timedelta(seconds=77))
        assert group._group.timeout_s == 77


def test_names(rank_pool: Any) -> None:
    rank_pool(2).run(run_names)


def run_subgroups(rank: int, world: int) -> None:
    with process_group():
        members = [[0, 2], [1], [2, 1]]
        groups = [dist.new_group(ranks) for ranks in members]
        for ranks, group in zip(members, groups, strict=True):
            if rank in ranks:
                mine = sorted(ranks).index(rank)
                assert dist.get_rank(group) == mine
                reduce(mine, len(ranks), group)
                tensor = torch.tensor([rank])
                dist.broadcast(tensor, max(ranks), group=group)  # a rank of the world
                assert tensor.item() == max(ranks)
        reduce(rank, world)
        mine_alone, _ = dist.new_subgroups(group_size=1)
        reduce(0, 1, mine_alone)
        dist.barrier()  # rank 0 serves the store, which others still need


def test_subgroups(rank_pool: Any) -> None:
    rank_pool(3).run(run_subgroups)


def run_many_groups(rank: int, world: int) -> None:
    """Asynchronous work in several groups at once, each in its own order."""
    with process_group() as group:
        groups = [group, *[dist.new_group() for _ in range(4)]]
        tensors = [values(rank, 1000 + n) for n in range(50)]
        works = [
            dist.all_reduce(tensor, group=groups[n % 5], async_op=True)
            for n, tensor in enumerate(tensors)
        ]
        for work in reversed(works):
            work.wait()
        assert_same(tensors, [total(world, 1000 + n) for n in range(50)])


def test_many_groups_at_once(rank_pool: Any) -> None:
    rank_pool(2).run(run_many_groups)


@pytest.mark.parametrize("default", ["smddp", "gloo"])
def test_beside_gloo(rank_pool: Any, default: str) -> None:
    rank_pool(2).run(run_beside_gloo, default)


def run_beside_gloo(rank: int, world: int, default: str) -> None:
    with process_group(default):
        other = dist.new_group(backend="gloo" if default == "smddp" else "smddp")
        for group in (None, other, None, other):
            reduce(rank, world, group)
        works = []
        tensors = [values(rank, 100) for _ in range(20)]
        for n, tensor in enumerate(tensors):
            group = other if n % 2 else None
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
        for work in works:
            work.wait()
        assert_same(tensors, [total(world, 100)] * 20)


def run_threads(rank: int, world: int) -> None:
    """Each thread has its own group, as torch wants it."""
    with process_group():
        errors: list[BaseException] = []
        groups = [dist.new_group() for _ in range(3)]

        def work(group: Any) -> None:
            try:
                for _ in range(100):
                    reduce(rank, world, group)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors


def test_threads(rank_pool: Any) -> None:
    rank_pool(2).run(run_threads)


def run_again(rank: int, world: int) -> None:
    """Init and destroy over and over in one process, also over one store that stays."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world, rank == 0)
    for _ in range(2):
        with process_group(store=store, rank=rank, world_size=world):
            reduce(rank, world)
    with no_leaks(ignore=("env",)):
        for _ in range(4):
            with process_group(store=store, rank=rank, world_size=world) as group:
                reduce(rank, world)
                dist.all_reduce(values(rank, 9), async_op=True).get_future().then(str).wait()
                reference = weakref.ref(group)
            del group
            gc.collect()
            assert reference() is None
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < world:  # it serves the store
        pass


def test_again_and_again(rank_pool: Any) -> None:
    rank_pool(2).run(run_again)


ENDS = {
    "destroy": "dist.destroy_process_group()",
    "twice": "dist.destroy_process_group(); group.shutdown(); group.shutdown()",
    "shutdown first": "group.shutdown(); dist.destroy_process_group()",
    "sub-group first": "dist.destroy_process_group(sub); dist.destroy_process_group()",
    "object survives": "kept.append(group); dist.destroy_process_group()",
    "nothing": "kept.append(model)",
    "nothing, with work in flight": "kept.append(dist.irecv(torch.empty(1), 1 - rank))",
    "nothing, with a future": "kept.append(dist.irecv(torch.empty(1), 1 - rank).get_future())",
    "exit in an exception": "raise SystemExit(0)",
    "abort": "dist.barrier(); dist.distributed_c10d._abort_process_group()",
}
# Forks a pair of ranks for each end, so that what DDP needs is imported once. A rank runs to the
# end of the script and leaves as every script does.
SCRIPT = """
import gc, os, sys, time
sys.modules["triton"] = None  # lists leaks of its own when a process ends
import torch, torch._dynamo, torch.distributed as dist
gc.freeze()

def finish(pids):
    codes, deadline = {}, time.monotonic() + 200
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in pids:
            if pid not in codes and os.waitpid(pid, os.WNOHANG)[0]:
                codes[pid] = 0
        time.sleep(0.01)
    for pid in set(pids) - set(codes):
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return len(codes) == len(pids)

def pair(number, end):
    pids = []
    os.environ.update(MASTER_PORT=str(PORTS[number]), WORLD_SIZE="2")
    for rank in range(2):
        pids.append(os.fork())
        if not pids[-1]:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            output = os.open(f"{WHERE}/{number}.{rank}", os.O_CREAT | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            return end
    finish(pids) or print(f"{end}: hangs", flush=True)

end = next(filter(None, (pair(*item) for item in enumerate(ENDS))), None)
if end:
    dist.init_process_group("smddp")
    rank = dist.get_rank()
    kept = []
    group, sub = dist.group.WORLD, dist.new_group()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(800, 800))
    for _ in range(3):
        model(torch.ones(2, 800)).sum().backward()
    dist.all_reduce(torch.ones(1), group=sub)
    work = dist.all_reduce(torch.ones(10), async_op=True)
    future = work.get_future().then(lambda f: f.value()[0] * 2)
    assert future.wait()[0] == 4
    dist.barrier(group=dist.new_group(backend="gloo"))
    exec(end)
    print("end")
"""


def test_every_end_is_quiet_and_quick(tmp_path: Path) -> None:
    ports = [free_port() for _ in ENDS]
    variables = f"PORTS, WHERE, ENDS = {ports}, {str(tmp_path)!r}, {list(ENDS.values())}\n"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", variables + SCRIPT],
        env=os.environ | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert run.stdout == ""  # nothing hung
    for number, name in enumerate(ENDS):
        for rank in range(2):
            output = (tmp_path / f"{number}.{rank}").read_text()
            assert output == ("" if "exception" in name else "end\n"), f"{name}: {output}"


def run_forked(rank: int, world: int) -> None:
    """A forked child is told that the group is not its own, and harms nothing, whatever it does."""
    with process_group():
        reduce(rank, world)
        dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
        pending = dist.irecv(torch.ones(1), 1 - rank).get_future()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with pytest.raises(SdpError, match="forked"):
                    pending.wait()
                with pytest.raises(SdpError, match="forked"):
                    reduce(rank, world)
                with pytest.raises(SdpError, match="forked"):
                    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
                dist.destroy_process_group()
                gc.collect()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        dist.send(torch.ones(1), 1 - rank)
        pending.wait()
        reduce(rank, world)
        dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()


def test_forked_children(rank_pool: Any) -> None:
    rank_pool(2).run(run_forked)


def run_closed(rank: int, world: int) -> None:
    """A closed group says so, whatever is called, and does not end the process."""
    dist.init_process_group("smddp")
    group = dist.group.WORLD
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    dist.destroy_process_group()
    for call in (
        lambda: group.allreduce([torch.ones(1)]).wait(),
        lambda: group.broadcast(torch.ones(1), 0).wait(),
        lambda: group.send([torch.ones(1)], 1 - rank, 0).wait(),
        lambda: group.barrier().wait(),
    ):
        with pytest.raises(SdpError, match="closed"):
            call()
    assert work.is_success()  # what was done stays done
    assert work.get_future().wait()[0].tolist() == [float(world)] * 3


def test_closed(rank_pool: Any) -> None:
    rank_pool(2).run(run_closed)
