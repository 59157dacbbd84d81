"""Which files a trace is written to, and when: also as jobs fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from sdp_plugins import trace
from sdp_plugins.core import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Group,
    SdpError,
)
from sdp_plugins.core.process_identity import clock_id, process_identity
from sdp_plugins.trace import trace_file
from sdp_plugins.trace.folder import free_path
from tests.core.test_fork import in_child
from tests.faults import gave_up, stay_away
from tests.ranks import HANG_S, Pool, run_ranks, start_ranks
from tests.trace.test_recorder import Json, read, slices, traced

# ---- jobs ---------------------------------------------------------------------------------------


def only_spans(rank: int, world: int, folder: str) -> Path | None:
    trace.start(folder)
    with trace.span("step"):
        pass
    return trace.stop()


def test_without_a_group_the_rank_is_the_job_s(rank_pool: Pool, tmp_path: Path) -> None:
    paths = rank_pool(2).run(only_spans, str(tmp_path))
    assert paths == [tmp_path / f"rank-{rank:05d}.json" for rank in range(2)]
    assert [read(tmp_path, rank)["otherData"]["world_size"] for rank in range(2)] == [2, 2]


OTHER_JOB = """
from sdp_plugins.core import Group
with Group.from_env() as group:
    group.all_reduce(bytearray(4))
"""


def start_another_job(rank: int, world: int) -> None:
    """Before its own trace is written, and after."""

    def other() -> None:
        alone = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        subprocess.run([sys.executable, "-c", OTHER_JOB], env=alone, check=True, timeout=HANG_S)

    with Group.from_env(timeout_s=60) as group:
        if rank == 0:
            other()
        group.barrier()
    if rank == 0:
        other()


def test_a_job_that_a_rank_starts_keeps_off_the_rank_s_trace(tmp_path: Path) -> None:
    run_ranks(2, start_another_job, env={"SDP_TRACE": str(tmp_path)})
    found = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    seen = [(f["otherData"]["world_size"], [e["name"] for e in slices(f)]) for f in found]
    assert sorted(seen) == [(1, ["all_reduce"])] + [(2, ["barrier"])] * 2


def test_which_files_are_replaced(tmp_path: Path) -> None:
    def about(job: str, process: str = "", where: str = "") -> Json:
        mine = process or process_identity(os.getpid())
        of = {"rank": 0, "world_size": 2, "clock": where or clock_id()}
        return {**of, "job": job, "process": mine}

    def name(there: Json | None, me: Json) -> str:
        path = tmp_path / "rank-00000.json"
        if there is None:
            path.write_text("{}")
        else:
            trace_file.write(path, there, [])
        return free_path(tmp_path, me).name

    me, plain = about("id:mine"), "rank-00000.json"
    other = f"rank-00000.{trace_file.job_token(me)}.json"
    parent = process_identity(os.getppid())
    assert name(me, me) == plain
    assert name(about("id:mine", "1@2"), me) == plain  # it has ended
    assert name(about("id:mine", parent), me) == other
    assert name(about("id:mine", "1@2", "another machine"), me) == other
    assert name(about("id:other", "1@2"), me) == other
    assert name(None, me) == other
    trace_file.write(tmp_path / other, about("id:mine", parent), [])
    assert name(None, me) == f"{other.removesuffix('.json')}-{os.getpid()}.json"


# ---- ends ---------------------------------------------------------------------------------------


def fail_in_the_middle(rank: int, world: int, how: str) -> None:
    with Group.from_env(timeout_s=30) as group:
        group.barrier()
        group.timeout_s = 1 if how == "time-out" else 30
        if rank == 1 and how == "exception":
            time.sleep(1)  # as long as the other rank waits for a time-out
            raise ZeroDivisionError("in user's code")
        if rank == 1:
            stay_away(1, world)
        try:
            group.all_reduce(np.ones(10))
        finally:
            if rank == 0 and how == "time-out":
                gave_up()


@pytest.mark.parametrize("how", ["exception", "time-out"])
def test_a_job_that_fails_leaves_its_trace(tmp_path: Path, how: str) -> None:
    with start_ranks(2, fail_in_the_middle, how, env={"SDP_TRACE": str(tmp_path)}) as ranks:
        ranks.outcomes()
        ranks.finish()
    found = read(tmp_path, 0)
    barrier, reduction = slices(found)
    assert (barrier["name"], reduction["name"]) == ("barrier", "all_reduce")
    assert reduction["args"]["blamed"] == "rank 1"
    assert "failed" not in barrier["args"]
    # Nearly all of it was waiting, and one sees for whom.
    assert reduction["dur"] * 0.9 < reduction["args"]["waiting_us"] <= reduction["dur"]
    (wait,) = (e for e in slices(found, "late") if e["ts"] >= reduction["ts"])
    assert (wait["name"], wait["dur"]) == ("waits for rank 1", reduction["args"]["waiting_us"])
    wanted = "rank 1 did not arrive" if how == "time-out" else "in user's code"
    assert wanted in reduction["args"]["failed"]
    assert wanted in found["otherData"]["failures"]["default"]
    assert slices(read(tmp_path, 1))


def queue_behind_a_failure(rank: int, world: int) -> None:
    with Group.from_env() as group:
        group.timeout_s = 0.5
        if rank == 1:
            stay_away(1, world)
            return
        for work in [group.barrier(async_op=True) for _ in range(3)]:
            assert work is not None
            with pytest.raises(SdpError):
                work.wait()
        gave_up()


def test_what_is_queued_behind_a_failure_has_not_run(tmp_path: Path) -> None:
    run_ranks(2, queue_behind_a_failure, env={"SDP_TRACE": str(tmp_path)})
    assert [event["args"]["seq"] for event in slices(read(tmp_path, 0))] == [1]


def receive_in_vain(rank: int, world: int) -> None:
    with Group.from_env() as group:
        group.timeout_s = 0.5
        if rank == 1:
            stay_away(1, world)
            return
        with pytest.raises(SdpError):
            group.recv(np.ones(10), 1)
        gave_up()


def test_a_receive_that_fails_is_shown(tmp_path: Path) -> None:
    run_ranks(2, receive_in_vain, env={"SDP_TRACE": str(tmp_path)})
    (event,) = slices(read(tmp_path, 0), "message")
    assert event["name"] == "recv" and event["args"]["blamed"] == "rank 1"


def differ(rank: int, world: int, folder: str) -> None:
    trace.start(folder)
    with Group.from_env(timeout_s=30) as group:
        group.barrier()
        if rank == 2:
            time.sleep(0.2)
        with pytest.raises(CollectiveMismatchError):
            group.all_reduce(np.ones(10 if rank != 1 else 11))
    trace.stop()


def test_whom_an_error_blames_need_not_be_the_last_to_arrive(
    rank_pool: Pool, tmp_path: Path
) -> None:
    rank_pool(3).run(differ, str(tmp_path))
    found = read(tmp_path, 0)
    assert slices(found)[-1]["args"]["blamed"] == "rank 1"
    assert slices(found, "late")[-1]["name"] == "waits for rank 2"


def time_out_and_be_killed(rank: int, world: int) -> None:
    group = Group.from_env()
    group.timeout_s = 0.5
    if rank == 1:
        time.sleep(600)
    with pytest.raises(CollectiveTimeoutError):
        group.barrier()
    os._exit(1)


def test_a_failure_is_written_at_once(tmp_path: Path) -> None:
    """A launcher may end the rank before it ends by itself."""
    environment = {"SDP_TRACE": str(tmp_path)}
    with start_ranks(2, time_out_and_be_killed, env=environment) as ranks:
        ranks[0].outcome()
        assert slices(read(tmp_path, 0))[0]["args"]["blamed"] == "rank 1"


def fail_again_and_again(rank: int, world: int) -> int:
    with mock.patch.object(trace_file, "write", wraps=trace_file.write) as write:
        group = Group.from_env()
        group.timeout_s = 0.5
        if rank == 1:
            stay_away(1, world)
            return 0
        for _ in range(5):
            with pytest.raises(SdpError):
                group.barrier()
        gave_up()
        return write.call_count


def test_a_failure_is_written_once(tmp_path: Path) -> None:
    """A program that goes on without its peers does not pay for it in each operation."""
    assert run_ranks(2, fail_again_and_again, env={"SDP_TRACE": str(tmp_path)}) == [1, 0]


def cannot_be_written(rank: int, world: int) -> None:
    group = Group.from_env(timeout_s=100)
    group.barrier()
    with pytest.warns(UserWarning, match="was not written"):
        group.close()


def test_what_cannot_be_written_fails_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run_ranks(2, cannot_be_written, env={"SDP_TRACE": str(tmp_path / "file")})


def forks(rank: int, world: int, folder: str) -> None:
    def body(group: Group) -> None:
        group.barrier()
        assert in_child(lambda: alone_in_child(folder)) == 0
        group.barrier()

    traced(rank, world, folder, body)


def alone_in_child(folder: str) -> None:
    assert trace.stop() is None
    trace.add_span("nothing", 0, 1)
    os.environ.update(RANK="0", WORLD_SIZE="1")
    trace.start(f"{folder}/child")
    with Group.from_env() as group:
        group.barrier()
    assert trace.stop() is not None


def test_a_forked_child_has_a_trace_of_its_own(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool(1).run(forks, str(tmp_path))
    for folder, wanted in ((tmp_path, 2), (tmp_path / "child", 1)):
        assert [e["name"] for e in slices(read(folder, 0))] == ["barrier"] * wanted
