"""What readers of the flight recorder believe of what they find: nothing."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdp_plugins.core import Group, _native
from sdp_plugins.core.errors import SdpError
from sdp_plugins.core.process_identity import clock_id, namespace, process_identity
from sdp_plugins.core.rank_info import Forming, RankInfo, group_token
from sdp_plugins.core.rank_names import RankNames
from sdp_plugins.flight import report_file
from sdp_plugins.flight.flight_recorder import flight_recorder
from sdp_plugins.flight.jobs import Job, find_jobs, jobs_of_process, match_jobs
from sdp_plugins.flight.rank_snapshot import RankSnapshot, latest, parse
from sdp_plugins.flight.segments import read_segments
from sdp_plugins.flight.untrusted import rank_info_from_json, rank_info_from_text
from sdp_plugins.flight.wait_report import report
from tests.ranks import Pool

INFO = RankInfo(7, "g", 1, 3, (4, 5, 9), "id:x", "123@456", 1, "here", "a clock")


def segment(info: bytes, name: str = "test") -> int:
    """A segment's file."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.pwrite(fd, info, _native.initialize_segment(fd, 0, 1, 65536))
    return fd


@pytest.fixture
def raw() -> Iterator[bytes]:
    """What is read of a rank that has done nothing."""
    fd = segment(INFO.pack())
    yield _native.read_flight(fd)
    os.close(fd)


# ---- whose a segment is -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "info",
    [
        INFO,
        INFO._replace(members=None, job=""),
        INFO._replace(name="ü" * 100, host="\N{SNOWMAN}"),
        INFO._replace(rank=999, world_size=1000, members=tuple(range(1000))),
        INFO._replace(rank=0, world_size=1, members=(0,)),
    ],
)
def test_a_rank_says_who_it_is(info: RankInfo) -> None:
    assert len(info.pack()) < _native.FLIGHT_RANK_INFO_BYTES
    assert rank_info_from_text(info.pack() + b"\0rest") == info


def test_what_does_not_fit_is_left_out() -> None:
    ranks = list(range(5000))
    random.Random(1).shuffle(ranks)
    info = INFO._replace(world_size=5000, members=tuple(ranks), name="n" * 9999)
    found = rank_info_from_text(info.pack())
    assert found == info._replace(members=None, name="n" * 200)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 3),
        ("rank", -1),
        ("rank", "1"),
        ("rank", True),
        ("world_size", 2**40),
        ("process", "x@y"),
        ("process", "9" * 5000),
        ("process", "\N{SUPERSCRIPT TWO}@1"),  # a digit that is no number
        ("name", None),
        ("token", 1.5),
    ],
)
def test_what_no_rank_says_of_itself(field: str, value: object) -> None:
    text = json.dumps(INFO.to_json() | {field: value})
    with pytest.raises(ValueError):
        rank_info_from_text(text.encode())


@pytest.mark.parametrize(
    "runs",
    [5, [[0, 4]], [[0, 2]], [[-1, 3]], [[0, 10**9]], [[0, "3"]], [7], [[2**70, 3]]],
)
def test_members_that_cannot_be(runs: object) -> None:
    assert rank_info_from_json(INFO.to_json() | {"members": runs}).members is None


@pytest.mark.parametrize("text", [b"", b"\xff", b"null", b"[" * 4000, b'{"rank": 1}', b"1" * 4000])
def test_a_text_that_says_nothing(text: bytes) -> None:
    fd = segment(text)
    with pytest.raises(ValueError):
        parse(_native.read_flight(fd))
    os.close(fd)


def twins(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Two of the processes that the clock of start times does not tell apart."""
    started: dict[str, list[int]] = {}
    for process in processes:
        pid, _, start = process_identity(process.pid).partition("@")
        started.setdefault(start, []).append(int(pid))
    return max(started.values(), key=len)[:2]


def test_ranks_that_start_at_the_same_time_are_told_apart() -> None:
    """Each holds the segments of both, and the clock has a hundred ticks a second."""
    with ExitStack() as opened:
        fds = [segment(b"", "sdp-twin") for _ in range(2)]
        for fd in fds:
            opened.callback(os.close, fd)
        processes = []
        for _ in range(20):
            process = subprocess.Popen(["sleep", "60"], pass_fds=fds)
            opened.callback(process.wait)
            opened.callback(process.kill)
            processes.append(process)
        pids = twins(processes)
        assert len(pids) == 2
        token = random.getrandbits(63)
        for rank, (pid, fd) in enumerate(zip(pids, fds, strict=True)):
            info = INFO._replace(rank=rank, token=token, process=process_identity(pid))
            os.pwrite(fd, info.pack(), _native.initialize_segment(fd, 0, 1, 65536))
        found = {
            s.info.rank: s.info.pid for s in read_segments().snapshots if s.info.token == token
        }
        assert found == dict(enumerate(pids))


def test_names_are_shown_on_one_line() -> None:
    assert rank_info_from_text(INFO._replace(name="a\nb\x1b[1m").pack()).name == "a?b?[1m"


def test_a_token_is_that_of_all_announcements() -> None:
    assert group_token([b"a", b"b"]) != group_token([b"a", b"c"])
    assert 0 < group_token([]) <= 2**56


# ---- rings --------------------------------------------------------------------------------------


def test_garbage_in_rings(raw: bytes) -> None:
    at = len(raw) - sum(_native.FLIGHT_SLOTS) * 112
    for seed in range(20):
        noise = random.Random(seed)
        length = len(raw) - at
        rings = bytes([seed]) * length if seed < 10 else noise.randbytes(length)
        snapshot = parse(raw[:at] + rings)
        assert snapshot.info == INFO
        assert report([snapshot]) and report_file.text_of([snapshot])
        assert RankSnapshot.from_json(json.loads(json.dumps(snapshot.to_json()))) == snapshot


FORMING_AT = 576 + _native.FLIGHT_RANK_INFO_BYTES


def with_forming(raw: bytes, since_ns: int, text: bytes) -> bytes:
    packed = struct.pack(f"<Q{_native.FLIGHT_FORMING_BYTES}s", since_ns, text)
    return raw[:FORMING_AT] + packed + raw[FORMING_AT + len(packed) :]


@pytest.mark.parametrize(
    "forming",
    [
        Forming(RankNames("g", 2), 5),
        Forming(RankNames("ü" * 200, 2**20), 2**62),
        Forming(RankNames("ü" * 200, 3, (7, 2, 3)), 5),
    ],
)
def test_a_group_that_is_being_made(raw: bytes, forming: Forming) -> None:
    found = parse(with_forming(raw, forming.since_ns, forming.pack())).forming
    assert found
    shown = found.names.group
    assert shown and forming.names.group.startswith(shown)
    assert found == (replace(forming.names, group=shown), forming.since_ns)
    many = Forming(replace(forming.names, world_size=100, global_ranks=tuple(range(0, 200, 2))), 5)
    cut = parse(with_forming(raw, 5, many.pack())).forming
    assert cut and cut.names.global_ranks is None  # there is no room


def test_garbage_in_a_group_that_is_being_made(raw: bytes) -> None:
    texts = [
        b"-1 [] g",
        b"2 [[0,1],[2,-1]] g",
        b"2 [[1048576,2]] g",
        b"2 " + b"[" * 200 + b" g",
        b"x [] g",
        b"1" * 248,
        b"9" * 30 + b" [] g",
        b"\xff" * 248,
        b"3 [] \x1b[2J",
        b"2 g",
        b"2 [] g",
    ]
    for number in (1, 2**63, 2**64 - 1):
        for text in texts:
            snapshot = parse(with_forming(raw, number, text))
            assert report([snapshot]) and "\x1b" not in report_file.text_of([snapshot])
            assert RankSnapshot.from_json(json.loads(json.dumps(snapshot.to_json()))) == snapshot


def test_garbage_in_heads(raw: bytes) -> None:
    for byte in (0, 0x7F, 0x80, 0xFF):
        snapshot = parse(bytes([byte]) * 576 + raw[576:])
        assert snapshot.state == ("open")
        assert report([snapshot])


def test_reports_that_were_changed(raw: bytes) -> None:
    def changed(found: Any, noise: random.Random) -> Any:
        if noise.random() < 0.1:
            return noise.choice([None, -5, 2**70, "x", [], {}, [[1] * 20], 1e300, True])
        if isinstance(found, dict):
            return {key: changed(value, noise) for key, value in found.items()}
        return [changed(value, noise) for value in found] if isinstance(found, list) else found

    events, forming = (some_event(), some_event()), Forming(RankNames("g", 2), 5)
    snapshot = parse(raw)._replace(operations=events, forming=forming)
    good = snapshot.to_json()
    refused = 0
    for seed in range(300):
        try:
            found = RankSnapshot.from_json(
                changed(json.loads(json.dumps(good)), random.Random(seed))
            )
            assert report([found])
        except (ValueError, TypeError, KeyError):
            refused += 1
    assert 0 < refused < 300


def some_event() -> Any:
    from sdp_plugins.core.trace_event import TraceEvent

    return TraceEvent(3, 5, 6, 0, 0, 0, 4, 16, -1, -1, -1, 9, 0, 0, 0, 0, 1, 0, 0, 0)


def test_of_each_rank_the_last_snapshot_counts(raw: bytes) -> None:
    first, second = parse(raw), parse(raw)
    assert latest([second, first]) == [second]


# ---- a peer that writes what it likes -----------------------------------------------------------


def scribble(group: Group, seed: int) -> None:
    """Overwrite this rank's whole record, in the file that all ranks have mapped."""
    inode = {snapshot.info.pid: None for snapshot in read_segments().snapshots}
    assert os.getpid() in inode
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "memfd:sdp-scribbled" not in os.readlink(f"/proc/self/fd/{fd}"):
                continue
            snapshot = parse(_native.read_flight(int(fd)))
        except (OSError, SdpError, ValueError):
            continue
        if snapshot.info.rank == group.rank:
            at = os.fstat(int(fd)).st_size - _native.FLIGHT_RANK_INFO_BYTES - 24 - 64
            at -= 8 + _native.FLIGHT_FORMING_BYTES + sum(_native.FLIGHT_SLOTS) * 112
            noise = random.Random(seed).randbytes(os.fstat(int(fd)).st_size - at)
            os.pwrite(int(fd), bytes([seed]) * len(noise) if seed < 256 else noise, at)


def with_a_scribbler(rank: int, world: int, seed: int) -> None:
    with Group.from_env(name="scribbled", timeout_s=30) as group:
        group.all_reduce(np.ones(10))
        if rank == 1:
            scribble(group, seed)
        group.barrier()
        if rank == 0:
            flight_recorder.show()
            with pytest.raises(ValueError):
                parse(group.issuer.node.flight(1))
            mine = [s.info for s in read_segments().snapshots if s.info.pid == os.getpid()]
            assert [info.rank for info in mine if info.name == "scribbled"] == [0]
        group.barrier()
        group.all_reduce(np.ones(10))


@pytest.mark.parametrize("seed", [0, 1, 0x7F, 0xFF, 1000, 1001])
def test_a_peer_that_scribbles(rank_pool: Pool, seed: int) -> None:
    rank_pool(2).run(with_a_scribbler, seed)


def test_a_folder_s_reports_are_read_together(raw: bytes, tmp_path: Path) -> None:
    snapshots = [parse(raw), parse(raw)]
    for rank, snapshot in enumerate(snapshots):
        mine = snapshot._replace(info=snapshot.info._replace(rank=rank))
        report_file.write(tmp_path, rank, [mine])
    assert [snapshot.info.rank for snapshot in report_file.read([tmp_path])] == [0, 1]


def test_a_process_that_went_from_job_to_job_is_found_by_each(raw: bytes) -> None:
    snapshot = parse(raw)
    later = snapshot._replace(info=INFO._replace(token=8, job="id:later"))
    other = snapshot._replace(info=INFO._replace(token=9, job="id:other", process="5@6"))
    found = find_jobs([snapshot, other, later])
    assert [job.keys for job in found] == [["id:other"], ["id:later", "id:x"]]
    for word in ("x", "id:later", "late"):
        assert match_jobs(found, word) == found[1:]
    assert match_jobs(found, "") == found


def test_a_launcher_is_no_part_of_a_key_and_no_parent_of_an_old_process(raw: bytes) -> None:
    """A key may contain any digits, and the pid of a rank that has ended may be reused."""
    here = INFO._replace(job=f"id:{os.getpid()}0", clock=clock_id(), pid_namespace=namespace("pid"))
    with subprocess.Popen(["sleep", "100"]) as child:
        rank = parse(raw)._replace(info=here._replace(process=process_identity(child.pid)))
        old = parse(raw)._replace(info=here._replace(process=f"{child.pid}@1"))
        assert jobs_of_process([Job([], [rank])], os.getpid())
        assert not jobs_of_process([Job([], [old])], os.getpid())
        child.kill()
    assert not jobs_of_process(find_jobs([parse(raw)._replace(info=here)]), os.getpid())


@pytest.mark.parametrize(
    "change",
    [{"op": 200}, {"dtype": 99}, {"issued": 0}, {"finished": -1}, {"path": 10**30}, {"op": 1.0}],
)
def test_events_that_cannot_be(raw: bytes, change: dict[str, Any]) -> None:
    found = parse(raw)._replace(messages=(some_event()._replace(**change),)).to_json()
    with pytest.raises(TypeError):
        RankSnapshot.from_json(json.loads(json.dumps(found)))


def test_what_a_rank_was_at_in_a_group_that_has_failed_is_over(raw: bytes) -> None:
    others = parse(raw)._replace(info=INFO._replace(rank=0, process="1@1"))
    waits = others._replace(operations=(some_event(),))
    late = parse(raw)
    there = late._replace(info=INFO._replace(token=8, name="h"), operations=(some_event(),))
    assert "group h; it has done nothing" in "\n".join(report([waits, late, there]))
    over = there._replace(state="failed", cause="why")
    large = [over._replace(info=over.info._replace(rank=rank)) for rank in (0, 1, 2)]
    text = report([*large, waits, late])
    assert "is in no operation; it has done nothing" in "\n".join(text)
    assert [line for line in text if line.startswith("group ")][-1].startswith("group h")
