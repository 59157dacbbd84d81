"""The trace: every operation once per rank, with its times, its bytes, and who came last."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from sdp_plugins import trace
from sdp_plugins.core import (
    FusionBuffer,
    Group,
    _native,
)
from sdp_plugins.core.trace_event import TraceEvent, unpack
from sdp_plugins.trace import recorder
from tests.ranks import Pool, run_ranks
from tests.trace.chrome_schema import check

Json = dict[str, Any]
WORLD = 2
SUFFIX = "smdataparallel_timeline.json"


def read(folder: Path, rank: int) -> Json:
    found: Json = json.loads((folder / f"rank-{rank:05d}.json").read_text())
    check(found)
    return found


def slices(found: Json, cat: str = "collective") -> list[Json]:
    return [event for event in found["traceEvents"] if event.get("cat") == cat]


def traced(rank: int, world: int, folder: str, body: Callable[[Group], None]) -> None:
    with Group.from_env(name="traced", timeout_s=30) as group:  # a pool may keep a default one
        trace.start(folder)
        body(group)
        assert trace.stop() == Path(folder) / f"rank-{rank:05d}.json"


# ---- every operation ----------------------------------------------------------------------------


def all_operations(group: Group) -> None:
    n, rank = group.world_size, group.rank
    one, all_ = np.ones(100, np.float32), np.ones(100 * n, np.float32)
    rows = [np.ones(100, np.float32) for _ in range(n)]
    at_root = rows if rank == 1 else None
    group.all_reduce(one)  # 1
    group.all_reduce(one, "avg", async_op=True).wait()
    group.reduce(one, 1)  # 3
    group.broadcast(one, 1)
    group.all_gather(all_, one)  # 5
    group.reduce_scatter(one, all_)
    group.gather(at_root, one, 1)  # 7
    group.scatter(one, at_root, 1)
    group.all_to_all_pieces(rows, [np.ones(100, np.float32) for _ in range(n)])  # 9
    group.barrier()
    fusion = FusionBuffer(group, [(50, np.float32), (60, np.float32)])  # 11
    for index, size in enumerate((50, 60)):
        fusion.ready(index, np.ones(size, np.float32))
    fusion.finish()
    if rank == 0:
        group.send(one, 1, 7)
    else:
        group.recv(one, 0, 7)


def run_all_operations(rank: int, world: int, folder: str) -> None:
    traced(rank, world, folder, all_operations)


EXPECTED = [
    # name, bytes, bytes of others than the root 1
    ("all_reduce", 400, 400),
    ("all_reduce", 400, 400),
    ("reduce", 400, 400),
    ("broadcast", 400, 400),
    ("all_gather", 800, 800),
    ("reduce_scatter", 800, 800),
    ("gather", 800, 400),
    ("scatter", 800, 400),
    ("all_to_all", 800, 800),
    ("barrier", 0, 0),
    ("all_reduce", 440, 440),
]


def test_every_operation_is_there_once(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool(WORLD).run(run_all_operations, str(tmp_path))
    ranks = [read(tmp_path, rank) for rank in range(WORLD)]
    for rank, found in enumerate(ranks):
        seen = sorted(slices(found), key=lambda event: event["args"]["seq"])
        wanted = [(name, other if rank == 0 else root) for name, root, other in EXPECTED]
        assert [(e["name"], e["args"]["bytes"]) for e in seen] == wanted
        assert [e["args"]["seq"] for e in seen] == list(range(1, len(EXPECTED) + 1))
        assert {e["args"]["group"] for e in seen} == {"traced"}
        assert seen[0]["args"]["data"] == "float32[100]"
        assert seen[1]["args"]["reduction"] == "avg"
        assert seen[2]["args"]["root"] == 1
        assert ["fusion buffer" in e["args"] for e in seen] == [False] * 10 + [True]
        assert seen[0]["args"]["runs in"] == "the caller's thread"
        assert seen[1]["args"]["runs in"] == "the engine's thread"
        (message,) = slices(found, "message")
        assert message["name"] == ("send", "recv")[rank]
        assert [message["args"][key] for key in ("peer", "tag", "bytes")] == [1 - rank, 7, 400]
    check_nobody_ends_before_all_begin(ranks)


def check_nobody_ends_before_all_begin(ranks: list[Json]) -> None:
    """One clock for all of them, and the times mean what they say."""
    for seq, (name, *_) in enumerate(EXPECTED, 1):
        if name not in ("all_reduce", "barrier", "all_gather"):
            continue
        same = [e for found in ranks for e in slices(found) if e["args"]["seq"] == seq]
        issued = [e["ts"] - e["args"]["queued_us"] for e in same]
        assert min(e["ts"] + e["dur"] for e in same) >= max(issued)
        assert len({e["args"]["last to arrive"] for e in same}) == 1


def events_of(rank: int, world: int) -> list[TraceEvent]:
    with Group.from_env(timeout_s=30) as group:
        native = group.issuer.node
        native.start_trace()
        works = [group.all_reduce(np.ones(10**5), async_op=True) for _ in range(5)]
        for work in works:
            assert work is not None
            work.wait()
        group.barrier()
        packed, dropped = native.trace_events()
        assert dropped == 0
        return list(unpack(packed))


def test_times_are_in_order(rank_pool: Pool) -> None:
    for events in rank_pool(WORLD).run(events_of):
        assert len(events) == 6
        for event in events:
            assert 0 < event.issued <= event.started <= event.finished
            assert event.issued <= event.arrived <= event.finished
        for before, after in pairwise(events):
            assert before.finished <= after.started  # a group's operations run one after the other
        assert any(event.waited for event in events)


# ---- who is late --------------------------------------------------------------------------------


def come_late(rank: int, world: int, folder: str, late: int) -> None:
    def body(group: Group) -> None:
        group.barrier()
        if rank == late:
            time.sleep(0.2)
        group.all_reduce(np.ones(10))

    traced(rank, world, folder, body)


@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_is_named(rank_pool: Pool, tmp_path: Path, late: int) -> None:
    rank_pool(3).run(come_late, str(tmp_path), late)
    for rank in range(3):
        found = read(tmp_path, rank)
        args = slices(found)[-1]["args"]
        assert args["last to arrive"] == f"rank {late}"
        assert args["waiting_us"] < 1e5 if rank == late else args["waiting_us"] > 1e5
        waits = [e["name"] for e in slices(found, "late") if e["dur"] > 1e5]
        assert waits == ([] if rank == late else [f"waits for rank {late}"])


# ---- on and off ---------------------------------------------------------------------------------


def stays_off(rank: int, world: int, folder: str) -> None:
    threads = threading.active_count()
    with Group.from_env(timeout_s=30) as group:
        group.all_reduce(np.ones(10))
        assert not group.issuer.node.traced
        assert group.issuer.node.trace_events() == (b"", 0)
        assert trace.stop() is None
    assert threading.active_count() == threads
    assert not os.listdir(folder)


def test_off_leaves_nothing(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool(WORLD).run(stays_off, str(tmp_path))


def two_traces(rank: int, world: int, folder: str) -> None:
    with Group.from_env(timeout_s=30) as group:
        group.barrier()
        for turn in range(2):
            trace.start(f"{folder}/{turn}")
            with pytest.raises(RuntimeError, match="call stop"):
                trace.start(folder)
            with trace.span("step"):
                group.all_reduce(np.ones(10))
            trace.stop()
            group.barrier()


def test_a_trace_begins_anew(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool(WORLD).run(two_traces, str(tmp_path))
    for turn, seq in enumerate((2, 4)):
        found = read(tmp_path / str(turn), 1)
        assert [event["args"]["seq"] for event in slices(found)] == [seq]
        assert [event["name"] for event in slices(found, "span")] == ["step"]


def overflow(rank: int, world: int) -> tuple[int, list[int]]:
    n = _native.TRACE_EVENTS + 100
    with Group.from_env(timeout_s=60) as group:
        native = group.issuer.node
        native.start_trace()
        for _ in range(n):
            group.barrier()
        packed, dropped = native.trace_events()
    return dropped, [event.seq for event in unpack(packed)]


def test_memory_is_bounded() -> None:
    """The last ones are kept: they are the ones before a failure."""
    n = _native.TRACE_EVENTS
    ((dropped, seqs),) = run_ranks(1, overflow)
    assert dropped == 100
    assert seqs == list(range(101, n + 101))


def close_many_groups(rank: int, world: int, folder: str) -> None:
    trace.start(folder)
    with mock.patch.multiple(recorder, MOST_OF_CLOSED_GROUPS=25, MOST_CLOSED_GROUPS=4):
        for number in range(6):
            with Group.from_env(name=f"group {number}", timeout_s=30) as group:
                for _ in range(10):
                    group.barrier()
    trace.stop()


def test_closed_groups_take_bounded_memory(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool(1).run(close_many_groups, str(tmp_path))
    found = read(tmp_path, 0)
    counts = Counter(event["args"]["group"] for event in slices(found))
    assert counts == {"group 3": 5, "group 4": 10, "group 5": 10}
    assert found["otherData"]["dropped"] == {"groups closed long ago": 30, "group 3": 5}


# ---- groups -------------------------------------------------------------------------------------


def several_groups(rank: int, world: int, folder: str) -> None:
    trace.start(folder)
    with Group.from_env(timeout_s=30) as group:
        pair = group.new_group([2, 0], name="pair")
        for _ in range(2):
            with Group.from_env(name="again", timeout_s=30) as again:
                again.barrier()
        if pair is not None:
            if rank == 0:
                time.sleep(0.2)
            pair.all_reduce(np.ones(10))
            pair.broadcast(np.ones(10), root=1)
            pair.close()
    trace.stop()


def test_several_groups(rank_pool: Pool, tmp_path: Path) -> None:
    """Those that are closed as well; two of one name are told apart."""
    rank_pool(3).run(several_groups, str(tmp_path))
    for rank in range(3):
        found = read(tmp_path, rank)
        groups = [e["args"]["group"] for e in slices(found) if e["name"] != "all_gather"]
        assert sorted(groups) == sorted(["again", "again (2)"] + ["pair"] * 2 * (rank != 1))
        seats = found["otherData"]["groups"]
        assert seats["again (2)"] == {
            **{"name": "again", "number": 2, "members": [0, 1, 2]},
            **{"rank": rank, "world_size": 3},
        }
        if rank != 1:
            assert (seats["pair"]["members"], seats["pair"]["rank"]) == ([2, 0], [1, -1, 0][rank])


def test_ranks_of_a_sub_group_are_named_as_in_the_job(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool(3).run(several_groups, str(tmp_path))
    found = read(tmp_path, 2)
    reduction, broadcast = (e for e in slices(found) if e["args"]["group"] == "pair")
    assert reduction["args"]["last to arrive"] == "rank 0"
    assert broadcast["args"]["root"] == 0
    assert "waits for rank 0" in {event["name"] for event in slices(found, "late")}


# ---- SMDDP's names ------------------------------------------------------------------------------


def profile(rank: int, world: int, folder: str) -> None:
    import smdistributed.dataparallel as smddp

    with Group.from_env(timeout_s=30) as group:
        for path, append in ((f"a_{SUFFIX}", True), (f"b{rank}", False)):
            smddp.start_profiler(f"{folder}/{path}", append_rank=append)
            group.all_reduce(np.ones(10))
            smddp.stop_profiler()
    smddp.stop_profiler()
    first = smddp._get_id_for_herring_task()
    assert smddp._get_id_for_herring_task() == first + 1


def test_start_profiler(rank_pool: Pool, tmp_path: Path) -> None:
    before = time.time()
    rank_pool(WORLD).run(profile, str(tmp_path))
    names = {f"{stem}_{SUFFIX}" for stem in ("a_00000", "a_00001", "b0", "b1")}
    assert {path.name for path in tmp_path.iterdir()} == names
    events = json.loads((tmp_path / f"a_00001_{SUFFIX}").read_text())
    check({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {}})
    began_us = events[0]["args"]["start_time_since_epoch_in_micros"]
    (found,) = (event for event in events if event.get("cat") == "collective")
    assert before - 1 < (began_us + found["ts"]) / 1e6 < time.time() + 1


def set_bucket_size(rank: int, world: int) -> list[int]:
    import smddpcommon

    with Group.from_env(timeout_s=30) as group:
        smddpcommon.setBucketSize(1280)
        with pytest.raises(ValueError, match="multiple of 128"):
            smddpcommon.setBucketSize(1300)
        fusion = FusionBuffer(group, [(160, np.float32)] * 4)
        return [len(bucket) for bucket in fusion.buckets]


def test_set_bucket_size() -> None:
    assert run_ranks(1, set_bucket_size) == [[2, 2]]
