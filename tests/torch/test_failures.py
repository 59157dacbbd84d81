"""What a job sees when a rank dies, stops, leaves or disagrees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from sdp_plugins.core import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from tests.faults import wait_for_go
from tests.ranks import HANG_S, Start, say, start_ranks
from tests.torch import models
from tests.torch.jobs import process_group

LIMIT_S = HANG_S / 2  # the groups' own time-outs are half an hour


def train_for_ever(rank: int, world: int, hook: bool) -> None:
    dist.init_process_group("smddp")
    model = models.wrap(models.Plain, None, gradient_as_bucket_view=True)
    if hook:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    models.train(model, rank)
    say("training")
    models.train(model, rank, steps=1_000_000)


@pytest.mark.parametrize(("world", "hook"), [(2, False), (3, True)])
def test_a_killed_rank_in_ddp(world: int, hook: bool) -> None:
    victim = world - 1
    with start_ranks(world, train_for_ever, hook) as ranks:
        for rank in ranks:
            assert rank.heard() == "training"
        killed_at = time.monotonic()
        ranks[victim].kill(signal.SIGKILL)
        for rank in range(victim):
            outcome = ranks[rank].outcome()
            assert isinstance(outcome.error, PeerLostError), ranks[rank].output()
            assert victim in outcome.error.ranks
            assert f"rank {victim}" in str(outcome.error)
            assert "all_reduce #" in str(outcome.error)
            assert outcome.ended_at - killed_at < LIMIT_S
        for rank in range(victim):
            assert ranks[rank].finish() == 0  # no hang and no crash at the exit, without destroy


def leave_early(rank: int, world: int, how: str) -> str:
    with process_group():
        dist.barrier()
        if rank == 1:
            if how == "raises":
                raise KeyError("a bug in the training script")
            os._exit(3)
        begin = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 1") as caught:
            dist.all_reduce(torch.ones(1000))
        assert time.monotonic() - begin < LIMIT_S
        return str(caught.value)


@pytest.mark.parametrize("how", ["raises", "exits"])
def test_a_rank_that_leaves(start_pooled: Start, how: str) -> None:
    with start_pooled(2, leave_early, how) as ranks:
        assert "all_reduce" in ranks[0].result()
        ranks[1].outcome()


def wait_for_a_stopped_rank(rank: int, world: int) -> None:
    with process_group():
        group = dist.new_group()
        group.set_timeout(timedelta(seconds=2))
        dist.all_reduce(torch.ones(1), group=group)
        if rank == 1:
            wait_for_go()
            return
        with pytest.raises(CollectiveTimeoutError, match=r"all_reduce #.*rank 1") as caught:
            dist.all_reduce(torch.ones(1000), group=group)
        assert caught.value.ranks == (1,)
        assert caught.value.elapsed_s >= 2


def test_a_stopped_rank_is_a_time_out(start_pooled: Start) -> None:
    with start_pooled(2, wait_for_a_stopped_rank) as ranks:
        assert ranks[1].heard() == "waiting"
        ranks[1].kill(signal.SIGSTOP)
        ranks[0].result()
        ranks[1].kill(signal.SIGUSR1)
        ranks[1].kill(signal.SIGCONT)
        ranks[1].result()


def run_barrier_time_out(rank: int, world: int) -> None:
    with process_group():
        afterwards = dist.new_group()
        if rank == 0:
            with pytest.raises(CollectiveTimeoutError, match="barrier"):
                dist.barrier(timeout=timedelta(milliseconds=200))
        dist.barrier(afterwards)


def test_a_time_out_of_one_call(rank_pool: Any) -> None:
    rank_pool(2).run(run_barrier_time_out)


DISAGREEMENTS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "size": lambda tensor, rank: dist.all_reduce(tensor[rank:]),
    "dtype": lambda tensor, rank: dist.all_reduce(tensor.view([torch.float32, torch.int32][rank])),
    "root": lambda tensor, rank: dist.broadcast(tensor, rank),
    "operation": lambda tensor, rank: (dist.reduce if rank else dist.broadcast)(tensor, 0),
}


def disagree(rank: int, world: int, what: str) -> str:
    with process_group():
        tensor = torch.ones(1000)
        with pytest.raises(CollectiveMismatchError) as caught:
            DISAGREEMENTS[what](tensor, rank)
        assert (tensor == 1).all()  # no byte was touched
        return str(caught.value)


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree(rank_pool: Any, what: str) -> None:
    for text in rank_pool(2).run(disagree, what):
        assert "rank 0" in text
        assert "rank 1" in text


WAITS: dict[str, Callable[[Any], Any]] = {
    "inline": lambda group: dist.all_reduce(torch.ones(10), group=group),
    "staged": lambda group: dist.all_reduce(torch.ones(1_000_000), group=group),
    "work": lambda group: dist.barrier(group, async_op=True).wait(),
    "future": lambda group: dist.barrier(group, async_op=True).get_future().wait(),
    "callback": lambda group: dist.barrier(group, async_op=True).get_future().then(str).wait(),
    "receive": lambda group: dist.recv(torch.ones(1), 1, group=group),
    "rendezvous": lambda group: dist.new_group(),
}


def wait_in_vain(rank: int, world: int) -> None:
    with process_group():
        groups = [dist.new_group() for _ in WAITS]
        if rank == 1:
            wait_for_go()
            return
        for group, wait in zip(groups, WAITS.values(), strict=True):
            try:
                say("waiting")
                wait(group)
            except KeyboardInterrupt:
                say("interrupted")


def test_ctrl_c_ends_every_wait(start_pooled: Start) -> None:
    with start_pooled(2, wait_in_vain) as ranks:
        for name in WAITS:
            assert ranks[0].heard() == "waiting"
            ranks[0].until_asleep()
            ranks[0].kill(signal.SIGINT)
            assert ranks[0].heard() == "interrupted", name
        ranks[1].kill(signal.SIGUSR1)
        ranks.results()


def train_briefly(rank: int, world: int) -> list[Any]:
    with process_group():
        model = models.wrap(models.Plain, None, bucket_cap_mb=100)
        models.train(model, rank)
        path = dist.group.WORLD.last_path
        assert models.agree(models.state(model))
        return [[parameter.sum().item() for parameter in model.parameters()], path]


SMALL_SHM = """
import sys
sys.path.insert(0, {root!r})
import json, os
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize <= 2**20
from tests.ranks import run_ranks
print(json.dumps(run_ranks(2, "from tests.torch.test_failures import train_briefly as main")))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_dev_shm_of_one_mebibyte(rank_pool: Any) -> None:
    """Docker's is small, and what is written beyond its end is a SIGBUS."""
    root = str(Path(__file__).parents[2])
    script = SMALL_SHM.format(root=root)
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", script]
    probe = subprocess.run(["unshare", "-m", "sh", "-c", mount, "sh", "true"], check=False)
    if probe.returncode != 0:
        pytest.skip("mount namespaces are not allowed here")
    run = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert run.returncode == 0, run.stderr
    expected = rank_pool(2).run(train_briefly)
    assert json.loads(run.stdout) == expected
    assert expected[0][1] == "zero-copy"
