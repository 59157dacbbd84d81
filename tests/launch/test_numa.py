"""Ranks on NUMA nodes, on machines that a folder describes as /sys does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from sdp_plugins.launch import numa
from sdp_plugins.launch.job_environment import job_environment
from tests.launch.jobs import Script, launch

TWO_SOCKETS = ("0-27,56-83", "28-55,84-111")
FOUR_NODES = ("0-3", "4-7", "8-11", "12-15")
MEMORY_ONLY = ("0-3", "4-7", "")


def machine(folder: Path, nodes: tuple[str, ...]) -> Path:
    for number, cores in enumerate(nodes):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(f"{cores}\n")
    (folder / "possible").write_text("0-1\n")
    return folder


def bound(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ranks: int, allowed: set[int], **variables: str
) -> list[set[int]]:
    monkeypatch.setattr(numa, "NODES", folder)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    return numa.cores_of_ranks(ranks, variables)


def test_two_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = machine(tmp_path, TWO_SOCKETS)
    first, second = nodes = numa.nodes_of(folder)
    assert [len(node) for node in nodes] == [56, 56]
    assert min(second) == 28
    every = first | second
    assert bound(monkeypatch, folder, 2, every) == [first, second]
    assert bound(monkeypatch, folder, 4, every) == [first, first, second, second]
    assert bound(monkeypatch, folder, 1, every) == [every]
    # Unequal shares would make ranks wait for the one with the fewest cores.
    assert bound(monkeypatch, folder, 3, every) == [every] * 3
    assert bound(monkeypatch, folder, 2, every, SDP_NUMA="0") == [every] * 2
    assert bound(monkeypatch, folder, 2, every, SDP_NUMA="maybe") == [first, second]
    # What the user has bound stays.
    assert bound(monkeypatch, folder, 2, {0, 1, 2}) == [{0, 1, 2}] * 2
    assert bound(monkeypatch, folder, 2, {0, 1, 28}) == [{0, 1, 28}] * 2
    assert bound(monkeypatch, folder, 2, {0, 1, 28, 30}) == [{0, 1}, {28, 30}]


def test_more_nodes_than_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, every = machine(tmp_path, FOUR_NODES), set(range(16))
    assert bound(monkeypatch, folder, 2, every) == [set(range(8)), set(range(8, 16))]
    assert bound(monkeypatch, folder, 8, every)[:3] == [{0, 1, 2, 3}] * 2 + [{4, 5, 6, 7}]
    assert bound(monkeypatch, folder, 6, every) == [every] * 6


def test_more_than_ten_nodes_are_in_their_order(tmp_path: Path) -> None:
    folder = machine(tmp_path, tuple(str(number) for number in range(12)))
    assert numa.nodes_of(folder) == [{number} for number in range(12)]


def test_memory_without_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = machine(tmp_path, MEMORY_ONLY)
    assert bound(monkeypatch, folder, 2, set(range(8))) == [{0, 1, 2, 3}, {4, 5, 6, 7}]


def test_a_kernel_without_numa(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert bound(monkeypatch, tmp_path, 2, {0, 1}) == [{0, 1}] * 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_run_where_they_are_bound(tmp_path: Path, script: Script) -> None:
    allowed = sorted(os.sched_getaffinity(0))[:2]
    folder = machine(tmp_path, tuple(str(core) for core in allowed))
    start = (
        f"import os, pathlib; os.sched_setaffinity(0, {allowed}); "
        "from sdp_plugins.launch import cli, numa; "
        f"numa.NODES = pathlib.Path({str(folder)!r}); cli.app()"
    )
    path = script("print(json.dumps([rank, sorted(os.sched_getaffinity(0))]))")
    launcher = [sys.executable, "-c", start, "run"]
    done = launch("-n", "2", "--no-prefix", path, launcher=launcher)
    assert done.returncode == 0, done.stderr
    found = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert found == [[0, [allowed[0]]], [1, [allowed[1]]]]


@pytest.mark.parametrize(
    ("base", "threads", "expected"),
    [
        ({}, None, None),  # each rank's framework has all of its cores
        ({}, 10, "4"),
        ({}, 13, "3"),
        ({}, 16, None),
        ({"OMP_NUM_THREADS": "14,2"}, None, "2"),
        ({"OMP_NUM_THREADS": "odd"}, None, None),
        ({"SDP_ENGINE_THREADS": "7"}, 10, "7"),
    ],
)
def test_free_cores_share_the_reductions(
    monkeypatch: pytest.MonkeyPatch,
    base: dict[str, str],
    threads: int | None,
    expected: str | None,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    environment = job_environment(base, 2, threads, "job")
    assert environment.get("SDP_ENGINE_THREADS") == expected
