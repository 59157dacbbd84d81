"""smddp as one of a group's backends, and torch's hooks around its calls; 2.14 and later."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from sdp_plugins.core import CollectiveMismatchError
from sdp_plugins.torch import share
from sdp_plugins.torch.groups import smddp_group
from sdp_plugins.torch.internals import TAKES_BACKENDS
from tests.ranks import HANG_S, run_ranks
from tests.torch.jobs import assert_same, process_group, total, values

pytestmark = pytest.mark.skipif(
    not TAKES_BACKENDS, reason="Python can subclass c10d's Backend since PyTorch 2.14"
)
of_2_15 = pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "_maybe_attach_flight_recorder"),
    reason="PyTorch 2.15 splits groups of CPUs, and records groups of other backends",
)
SLOTS = "cpu:smddp,cuda:gloo"
CPU = torch.device("cpu")


def use_all_calls(rank: int, world: int, group: Any = None) -> None:
    tensor = values(rank, 50)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    assert work.wait()
    assert_same(tensor, total(world, 50))
    assert_same(work.get_future().wait(), [total(world, 50)])
    parts = [torch.empty(3) for _ in range(world)]
    dist.all_gather(parts, values(rank, 3), group=group)
    assert_same(parts, [values(each, 3) for each in range(world)])
    whole = torch.empty(3 * world)
    dist.all_gather_into_tensor(whole, values(rank, 3), group=group)
    assert_same(whole, torch.cat(parts))
    mine = torch.empty(3)
    dist.reduce_scatter_tensor(mine, whole.clone(), group=group)
    assert_same(mine, world * parts[rank])
    exchanged = torch.empty(world)
    dist.all_to_all_single(exchanged, torch.full((world,), float(rank)), group=group)
    assert_same(exchanged, torch.arange(float(world)))
    seen: list[Any] = [None] * world
    dist.all_gather_object(seen, {"rank": rank}, group=group)
    assert seen == [{"rank": each} for each in range(world)]
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (world,))
    dist.all_reduce(sparse, group=group)
    assert_same(sparse.to_dense(), torch.ones(world))
    if rank == 0:
        dist.send(values(5, 4), 1, group=group)
    elif rank == 1:
        received = torch.empty(4)
        dist.recv(received, 0, group=group)
        assert_same(received, values(5, 4))
    dist.barrier(group=group)


def paths_of_steps(group: Any) -> list[str]:
    """Train for three steps; the paths of the bucket's all_reduces."""
    model = DistributedDataParallel(nn.Linear(600, 600))
    paths = []
    for _ in range(3):
        model(torch.ones(2, 600)).sum().backward()
        paths.append(str(group.last_path))
    return paths


def run_slots(rank: int, world: int, backends: str) -> None:
    with process_group(backends, timeout=timedelta(seconds=99)) as group:
        ours = smddp_group()
        assert type(group) is dist.ProcessGroup
        assert group._get_backend(CPU).name() == "smddp"
        assert group._get_backend(torch.device("cuda")).name() == "gloo"
        assert dist.get_backend() == backends
        assert ours._group.timeout_s == 99
        use_all_calls(rank, world)
        assert paths_of_steps(ours)[-1] == "zero-copy"
        use_all_calls(rank, world, dist.new_group(range(world)))
        group.set_timeout(timedelta(seconds=77))
        assert ours._group.timeout_s == 77
        big = torch.ones(600_000)
        share(big)
        dist.all_reduce(big)
        assert ours.last_path == "zero-copy"
        with pytest.raises(CollectiveMismatchError, match="ranks disagree"):
            dist.all_reduce(torch.ones(4 + rank))


@pytest.mark.parametrize("backends", [SLOTS, "cuda:gloo,cpu:smddp"])
def test_smddp_serves_one_type_of_device(rank_pool: Any, backends: str) -> None:
    rank_pool(2).run(run_slots, backends)


def run_limits(rank: int, world: int) -> None:
    with process_group(SLOTS):
        work = dist.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        work.wait()
        assert not work.is_completed()
        with pytest.raises(RuntimeError, match="sourceRank"):
            dist.recv(torch.empty(1)) if rank else [dist.send(torch.ones(1), 1), work.source_rank()]


def test_what_torchs_handles_of_other_backends_lack(rank_pool: Any) -> None:
    """As docs/torch.md says; if this fails, torch has come to pass more of a Work on."""
    rank_pool(2).run(run_limits)


def save_in_background(rank: int, world: int, folder: str) -> None:
    with process_group(SLOTS):
        state = {"weights": values(rank, 9), "step": rank}
        dcp.async_save({f"of {rank}": state}, checkpoint_id=folder).result(timeout=HANG_S)
        read = {f"of {rank}": {"weights": torch.zeros(9), "step": -1}}
        dcp.load(read, checkpoint_id=folder)
        assert read[f"of {rank}"]["step"] == rank
        assert_same(read[f"of {rank}"]["weights"], values(rank, 9))


def test_an_asynchronous_checkpoint_takes_the_default_group(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool(2).run(save_in_background, str(tmp_path))


def run_detail(rank: int, world: int) -> None:
    with process_group(SLOTS) as group:
        assert type(group._get_backend(CPU)).__name__ == "_ProcessGroupWrapper"
        assert smddp_group() is not None
        dist.all_reduce(torch.ones(3))
        with pytest.raises(RuntimeError, match=r"mismatch|shapes differ"):
            dist.all_reduce(torch.ones(2, 3) if rank else torch.ones(3, 2))


def test_detail(rank_pool: Any) -> None:
    run_ranks(2, run_detail, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def run_splits(rank: int, world: int, backends: str) -> None:
    with process_group(backends, timeout=timedelta(seconds=99)):
        ranks = [[2, 0], [1]]
        part = dist.split_group(split_ranks=ranks, group_desc="part", timeout=timedelta(seconds=66))
        assert part is not None
        mine = next(each for each in ranks if rank in each)
        assert dist.get_process_group_ranks(part) == mine
        assert part.group_desc == "part"
        assert smddp_group(part)._group.timeout_s == 66
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=part)
        assert tensor.item() == sum(mine)
        dist.destroy_process_group(part)
        if backends == "smddp":
            some = dist.split_group(split_ranks=[[1, 2]])
            assert (some is dist.GroupMember.NON_GROUP_MEMBER) == (rank == 0)
        else:
            with (
                pytest.raises(ValueError, match="in none of split_ranks")
                if rank == 0
                else nullcontext()
            ):
                dist.split_group(split_ranks=[[1, 2]])
        dist.barrier()  # rank 0 serves the store


@of_2_15
@pytest.mark.parametrize("backends", ["smddp", SLOTS])
def test_split_group(rank_pool: Any, backends: str) -> None:
    rank_pool(3).run(run_splits, backends)


class Seen:
    """What hooks have seen."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def before(self, call: Any) -> None:
        self.calls.append(f"{call.name.name} {call.async_op}")

    def after(self, call: Any) -> None:
        self.calls.append(f"end of {call.name.name}")


def run_hooks(rank: int, world: int) -> None:
    with process_group() as group:
        seen, tensor = Seen(), torch.ones(3)
        group.register_pre_hook(1, seen.before)
        group.register_post_hook(1, seen.after)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        assert work.wait()
        assert work.is_completed()
        assert_same(work.result(), [torch.full((3,), float(world))])
        dist.barrier()
        calls = ["ALLREDUCE True", "end of ALLREDUCE", "BARRIER False", "end of BARRIER"]
        assert seen.calls == calls
        use_all_calls(rank, world)
        assert paths_of_steps(group)[-1] == "zero-copy"
        with CommDebugMode() as counted:
            dist.all_reduce(tensor)
        assert counted.get_total_counts() == 1
        with FakeTensorMode(), pytest.raises(ValueError, match="FakeTensor has no memory"):
            dist.all_reduce(torch.ones(3))
        group.unregister_post_hook(1)
        seen.calls.clear()
        if rank:
            dist.send(tensor, 0)
        else:
            assert dist.recv(tensor) == 1
        assert seen.calls == ["SEND True" if rank else "RECV True"]
        group.unregister_pre_hook(1)
        with pytest.raises(CollectiveMismatchError, match="ranks disagree"):
            dist.all_reduce(torch.ones(4 + rank))
        assert len(seen.calls) == 1


def test_hooks_see_each_call(rank_pool: Any) -> None:
    rank_pool(2).run(run_hooks)


def run_nan_check(rank: int, world: int) -> None:
    with process_group():
        dist.all_reduce(torch.ones(3))
        with pytest.raises(RuntimeError, match="NaN"):
            dist.all_reduce(torch.tensor([1.0, float("nan")]))


def test_torchs_check_for_nan() -> None:
    run_ranks(2, run_nan_check, env={"TORCH_DIST_NAN_CHECK": "1"})


def record(rank: int, world: int, backends: str) -> list[dict[str, Any]]:
    from torch._C import _distributed_c10d as c10d

    with process_group(backends):
        dist.all_reduce(torch.ones(5))
        dist.broadcast(torch.ones(2), 1)
        with pytest.raises(CollectiveMismatchError):
            dist.all_reduce(torch.ones(6 + rank))
        c10d._dump_fr_trace_file(rank, backend="smddp")  # type: ignore[attr-defined]
        server = c10d._WorkerServer("127.0.0.1", 0)  # what torch.distributed.debug asks
        url = f"http://127.0.0.1:{server.port}/handler/fr_trace_json?backend=smddp"
        found = json.load(urlopen(Request(url, method="POST"), timeout=HANG_S))
        server.shutdown()
    entries: list[dict[str, Any]] = found["entries"]
    return entries


@of_2_15
@pytest.mark.parametrize("backends", ["smddp", SLOTS])
def test_torchs_flight_recorder_and_its_analyser(backends: str, tmp_path: Path) -> None:
    files = tmp_path / "trace_"
    env = {"TORCH_FR_BUFFER_SIZE": "100", "TORCH_FR_DUMP_TEMP_FILE": str(files)}
    for entries in run_ranks(2, record, backends, env=env):
        names = [(entry["profiling_name"], entry["input_sizes"]) for entry in entries]
        assert names[:2] == [("smddp:all_reduce", [[5]]), ("smddp:broadcast", [[2]])]
    analyser = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    shown = subprocess.run(
        [*analyser, str(tmp_path), "-p", "trace_"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert shown.returncode == 0, shown.stderr
    text = shown.stdout + shown.stderr
    assert "Collective sequence number: 3 has errors" in text
    assert re.search(r"Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH.*'\[\[7\]\]'", text)
