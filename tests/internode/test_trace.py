"""The trace of groups that span nodes: whole operations, and their steps in each node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdp_plugins import trace
from sdp_plugins.core import CollectiveTimeoutError, Group, SdpError
from sdp_plugins.trace.merge import merge
from tests.faults import gave_up, stay_away
from tests.internode.spanning import meet
from tests.ranks import Pool
from tests.trace.chrome_schema import check


def run_some(rank: int, world: int, root: str) -> None:
    with meet("1+2", root, "g") as group:
        trace.start(f"{root}/trace")
        group.all_reduce(np.ones(1000, np.float32))
        works = [group.all_reduce(np.ones(300_000, np.float32), async_op=True) for _ in range(3)]
        for work in works:
            assert work is not None
            work.wait()
        group.barrier()
        if rank == 0:
            group.send(np.ones(10), 2, 5)
        if rank == 2:
            group.recv(np.ones(10), 0, 5)
        trace.stop()


def test_operations_across_nodes(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool(3).run(run_some, str(tmp_path))
    merge(tmp_path / "trace")
    found = json.loads((tmp_path / "trace" / "trace.json").read_text())
    check(found)
    for rank in range(3):
        mine = [event for event in found["traceEvents"] if event["pid"] == rank]
        whole = [event for event in mine if event.get("cat") == "collective"]
        assert [(e["name"], e["args"]["seq"], e["args"]["bytes"]) for e in whole] == [
            ("all_reduce", 1, 4000),
            *[("all_reduce", seq, 1_200_000) for seq in (2, 3, 4)],
            ("barrier", 5, 0),
        ]
        assert all("last to arrive" in event["args"] for event in whole)
        steps = {e["args"]["seq"] for e in mine if e.get("cat") == "step"}
        assert steps == {1, 2, 3, 4, 5}
        messages: list[dict[str, Any]] = [e for e in mine if e.get("cat") == "message"]
        assert [(e["name"], e["args"]["peer"]) for e in messages] == (
            {0: [("send", 2)], 1: [], 2: [("recv", 0)]}[rank]
        )


def until_it_fails(group: Group) -> None:
    for _ in range(100):
        group.all_reduce(np.ones(10))


def fail(rank: int, world: int, root: str) -> None:
    group = meet("2x1", root, "g", timeout_s=30)
    trace.start(f"{root}/trace")
    group.barrier()
    if rank == 1:
        group.abort("had enough")
    with pytest.raises(SdpError, match="had enough"):
        until_it_fails(group)
    trace.stop()
    group.close()


def test_a_failure_across_nodes(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool(2).run(fail, str(tmp_path))
    found = json.loads((tmp_path / "trace" / "rank-00000.json").read_text())
    failed = [e for e in found["traceEvents"] if "failed" in e.get("args", {})]
    assert failed and failed[0]["args"]["blamed"] == "rank 1"
    assert "had enough" in failed[0]["args"]["failed"]


def wait_in_vain(rank: int, world: int, root: str) -> None:
    group = meet("2x1", root, "g")
    group.barrier()
    trace.start(f"{root}/trace")
    group.timeout_s = 1
    if rank == 1:
        stay_away(1, world)
    else:
        with pytest.raises(CollectiveTimeoutError):
            group.all_reduce(np.ones(10))
        gave_up()
    trace.stop()
    group.close()


def test_a_time_out_across_nodes_is_waiting(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool(2).run(wait_in_vain, str(tmp_path))
    found = json.loads((tmp_path / "trace" / "rank-00000.json").read_text())
    (failed,) = (e for e in found["traceEvents"] if e.get("cat") == "collective")
    assert failed["args"]["waiting_us"] == pytest.approx(failed["dur"])
    names = {e["name"] for e in found["traceEvents"] if e.get("cat") == "late"}
    assert names == {"waits for rank 1"}
