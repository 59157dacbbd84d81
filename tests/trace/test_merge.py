"""One trace of all ranks: their clocks, and which ranks were late."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdp_plugins import trace
from sdp_plugins.core import Group
from sdp_plugins.trace import trace_file
from sdp_plugins.trace.folder import clear, prepared
from sdp_plugins.trace.merge import merge
from tests.ranks import HANG_S, run_ranks
from tests.trace.chrome_schema import check

Json = dict[str, Any]


def train(rank: int, world: int) -> None:
    with Group.from_env(timeout_s=30) as group:
        for _ in range(3):
            with trace.span("step"):
                group.all_reduce(np.ones(1000))
        group.barrier()


def test_a_job_s_traces_are_merged(tmp_path: Path) -> None:
    run_ranks(3, train, env={"SDP_TRACE": str(tmp_path)})
    merge(tmp_path)
    path = tmp_path / "trace.json"
    found = json.loads(path.read_text())
    check(found)
    collectives = [e for e in found["traceEvents"] if e.get("cat") == "collective"]
    assert len(collectives) == 3 * 4
    arrows = [e for e in found["traceEvents"] if e["ph"] in "stf"]
    assert sorted(e["ph"] for e in arrows if e["id"] == 1) == ["f", "s", "t"]
    assert min(e["ts"] for e in found["traceEvents"] if "ts" in e) == 0
    assert found["otherData"]["ranks_without_a_trace"] == []
    command = [sys.executable, "-m", "sdp_plugins.trace", "merge", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert "last to arrive" in done.stdout and str(path) in done.stdout
    clear(tmp_path)
    assert not list(tmp_path.iterdir())


# ---- the folder ----------------------------------------------------------------------------------


def test_only_files_of_ours_are_removed(tmp_path: Path) -> None:
    """torch.profiler writes a trace.json, too."""
    others = ("rank-results.json", "trace.json.gz", "rank-00000.json.bak", ".rank-00000.json.swp")
    ours = ["trace.json", "rank-00000.json", "rank-00001.json", ".rank-00002.json.77"]
    ours += ["rank-00000.0123abcd.json", "rank-00000.0123abcd-77.json"]
    for name in others:
        (tmp_path / name).write_text("{}")
    for name in ours:
        trace_file.write(tmp_path / name, {"rank": 0}, [])
    assert prepared(tmp_path) == {"SDP_TRACE": str(tmp_path)}
    assert {path.name for path in tmp_path.iterdir()} == {*others}
    with pytest.raises(FileNotFoundError):
        merge(tmp_path)


@pytest.mark.parametrize("name", ["trace.json", "rank-00000.json"])
def test_a_file_of_somebody_else_s_is_not_replaced(tmp_path: Path, name: str) -> None:
    trace_file.write(tmp_path / "rank-00001.json", {"rank": 1}, [])
    (tmp_path / name).write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match=rf"{name} there was written by something else. Hint: "):
        prepared(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {name, "rank-00001.json"}
    with pytest.raises(ValueError, match=rf"{name} (was written|is not the trace)"):
        merge(tmp_path)
    assert (tmp_path / name).read_text() == '{"traceEvents": []}'


# ---- traces as a test wants them -----------------------------------------------------------------


def collective(seq: int, begin: float, end: float, **args: Any) -> Json:
    about = {"group": "default", "seq": seq, "bytes": 4096, "queued_us": 0.0, **args}
    slice_ = {"name": "all_reduce", "cat": "collective", "ph": "X", "pid": 0, "tid": 1}
    return {**slice_, "ts": begin, "dur": end - begin, "args": about}


def default_group(rank: int, members: tuple[int, ...] = (0, 1)) -> Json:
    """A rank's seat in a group of two."""
    of = {"name": "default", "number": 1, "members": members, "world_size": 2}
    return {**of, "rank": members.index(rank)}


def write(folder: Path, rank: int, events: list[Json], name: str = "", **about: Any) -> None:
    other = {
        "rank": rank,
        "world_size": 2,
        "job": "id:mine",
        "clock": "one",
        "wall_minus_monotonic_us": 0.0,
        "dropped": {},
        "failures": {},
        **({} if "groups" in about else {"groups": {"default": default_group(rank)}}),
        **about,
    }
    path = folder / name if name else folder / f"rank-{rank:05d}.json"
    trace_file.write(path, other, ({**e, "pid": rank} for e in events))


def merged(folder: Path) -> Json:
    merge(folder)
    found: Json = json.loads((folder / "trace.json").read_text())
    return found


def said(folder: Path, job: str = "") -> str:
    return merge(folder, job)


def by_rank(found: Json) -> dict[int, list[Json]]:
    slices = [e for e in found["traceEvents"] if e.get("cat") == "collective"]
    return {rank: [e for e in slices if e["pid"] == rank] for rank in (0, 1)}


def test_clocks_are_aligned_by_collectives(tmp_path: Path) -> None:
    """Rank 1's clock is 5 s ahead; the shortest operation says how well that is known."""
    shift = 5e6
    write(tmp_path, 0, [collective(1, 0, 1000), collective(2, 2000, 2100)])
    mine = [collective(1, 500 + shift, 1010 + shift), collective(2, 2010 + shift, 2090 + shift)]
    write(tmp_path, 1, mine, clock="two")
    found = merged(tmp_path)
    offset = found["otherData"]["clocks"]["two"]
    assert abs(offset["us"] + shift) <= offset["accuracy_us"] <= 100
    zero, one = by_rank(found).values()
    assert all(abs(b["ts"] - a["ts"]) < 600 for a, b in zip(zero, one, strict=True))
    assert "aligned to 0.0" in said(tmp_path)


def test_failed_collectives_tell_nothing_of_clocks(tmp_path: Path) -> None:
    """Who gives up has not waited for all others."""
    write(tmp_path, 0, [collective(1, 1000, 1100), collective(2, 2000, 2100, failed="a time-out")])
    late = collective(2, 9000, 9100, failed="a time-out")
    write(tmp_path, 1, [collective(1, 1000, 1100), late], clock="two")
    offset = merged(tmp_path)["otherData"]["clocks"]["two"]
    assert offset == {"us": 0.0, "accuracy_us": 100.0}


def test_without_common_collectives_wall_clocks_have_to_do(tmp_path: Path) -> None:
    write(tmp_path, 0, [collective(1, 1000, 2000)], wall_minus_monotonic_us=100.0)
    write(tmp_path, 1, [collective(2, 1000, 2000)], clock="two", wall_minus_monotonic_us=400.0)
    found = merged(tmp_path)
    assert found["otherData"]["clocks"]["two"] == {"us": 300.0, "accuracy_us": None}
    assert "wall clocks only" in said(tmp_path)


def test_the_last_of_all_ranks_is_named(tmp_path: Path) -> None:
    """Also where a rank has seen those of its own node only."""
    first = collective(1, 0, 1000, **{"last to arrive": "rank 0"})
    write(tmp_path, 0, [first, collective(2, 2000, 2010)])
    write(tmp_path, 1, [collective(1, 700, 1000), collective(2, 1200, 2010)])
    for events in by_rank(merged(tmp_path)).values():
        assert [e["args"]["last to arrive"] for e in events] == ["rank 1", "rank 0"]
        assert [e["args"]["late_us"] for e in events] == [700, 800]
    rows = [line.split()[5:7] for line in said(tmp_path).splitlines()[1:3]]
    assert rows == [["1", "times,"], ["1", "times,"]]
    arrows = [e for e in merged(tmp_path)["traceEvents"] if e["ph"] in "sf"]
    assert [(e["id"], e["ph"], e["pid"]) for e in sorted(arrows, key=lambda e: e["ts"])] == [
        *[(1, "s", 0), (1, "f", 1)],
        *[(2, "s", 1), (2, "f", 0)],
    ]


def test_who_did_not_come_to_a_failed_operation(tmp_path: Path) -> None:
    write(tmp_path, 0, [collective(1, 0, 10), collective(2, 20, 99, failed="a time-out")])
    write(tmp_path, 1, [collective(1, 0, 10)])
    found = merged(tmp_path)
    assert by_rank(found)[0][1]["args"]["did not arrive"] == "rank 1"


def test_who_did_not_come_is_named_as_in_the_job(tmp_path: Path) -> None:
    groups = {"default": default_group(1, (1, 2))}
    failed = collective(2, 20, 5020, waiting_us=4990.0, failed="a time-out")
    write(tmp_path, 1, [collective(1, 0, 10), failed], world_size=3, groups=groups)
    event = by_rank(merged(tmp_path))[1][1]
    assert event["args"]["did not arrive"] == "rank 2 (no trace)"
    line = "rank 2 (no trace) did not arrive at all_reduce #2 of default: rank 1 waited 5.0 ms"
    assert line in said(tmp_path).splitlines()


def test_who_came_when_the_others_had_given_up(tmp_path: Path) -> None:
    write(tmp_path, 0, [collective(1, 0, 5020, waiting_us=5000.0, failed="a time-out")])
    write(tmp_path, 1, [collective(1, 6000, 6010)])
    line = "rank 1 arrived at all_reduce #1 of default 6.0 ms late: rank 0 waited 5.0 ms"
    assert line in said(tmp_path).splitlines()


def test_groups_of_a_name_are_told_apart_by_their_members(tmp_path: Path) -> None:
    for rank in range(4):
        members = (0, 1) if rank < 2 else (2, 3)
        groups = {"default": default_group(rank, members)}
        write(tmp_path, rank, [collective(1, rank, 10)], world_size=4, groups=groups)
    events = [e for e in merged(tmp_path)["traceEvents"] if e.get("cat") == "collective"]
    last = [event["args"]["last to arrive"] for event in events]
    assert last == ["rank 1", "rank 1", "rank 3", "rank 3"]


def test_a_job_among_others(tmp_path: Path) -> None:
    """Such as a rank of it has started, which inherited SDP_TRACE."""
    for rank in range(2):
        write(tmp_path, rank, [collective(1, rank, 10)])
    write(tmp_path, 0, [], "rank-00000.0123abcd.json", world_size=1)
    write(tmp_path, 0, [], "rank-00000.0123abcd-77.json")
    with pytest.raises(ValueError, match=r"several jobs: \w{8} \(2 ranks\), \w{8} \(1 rank\)"):
        merge(tmp_path)
    with pytest.raises(ValueError, match="no traces of job x, but of"):
        merge(tmp_path, "x")
    word = trace_file.job_token({"job": "id:mine", "world_size": 2})
    for job in ("mine", word):
        lines = said(tmp_path, job).splitlines()
        assert [line.split()[:2] for line in lines[1:3]] == [["0", "1"], ["1", "1"]]
        left = "rank-00000.0123abcd-77.json, rank-00000.0123abcd.json"
        assert lines[-1] == f"left out, of other jobs or processes: {left}"


def test_ranks_without_a_trace_are_named(tmp_path: Path) -> None:
    write(tmp_path, 0, [collective(1, 0, 10)], world_size=3)
    write(tmp_path, 1, [collective(1, 0, 10)], world_size=3)
    assert "no trace of rank 2" in said(tmp_path)


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="SDP_TRACE"):
        merge(tmp_path)
    write(tmp_path, 0, [])
    (tmp_path / "rank-00001.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    with pytest.raises(ValueError, match=r"rank-00001.json is not the trace"):
        merge(tmp_path)
    write(tmp_path, 1, [{"ph": "X", "ts": 0, "dur": 1}])
    with pytest.raises(ValueError, match=r"rank-00001.json is not the trace of a rank: KeyError"):
        merge(tmp_path)
    write(tmp_path, 1, [])
    whole = (tmp_path / "rank-00001.json").read_text()
    (tmp_path / "rank-00001.json").write_text(whole.rpartition("]")[0])
    with pytest.raises(ValueError, match=r"rank-00001.json .*truncated"):
        merge(tmp_path)


def test_a_merge_keeps_no_events(tmp_path: Path) -> None:
    """A job may leave gigabytes of them."""
    for rank in range(2):
        events = (collective(seq, 10 * seq, 10 * seq + 5) for seq in range(1, 5001))
        write(tmp_path, rank, [*events])
    tracemalloc.start()
    merge(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6e6  # parsed and kept they alone take more
