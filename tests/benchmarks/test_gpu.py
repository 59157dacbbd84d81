"""The benchmark of device tensors, on CPU tensors: all parts run, and failures are reported."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.gpu.bench import Bench, Part
from benchmarks.gpu.cli import PARTS
from benchmarks.gpu.parts import floor_us
from benchmarks.gpu.plan import GpuPlan
from benchmarks.gpu.trace import share_of
from benchmarks.job import JobError

pytest.importorskip("torch")

NEEDS_DEVICE = {"own_all_reduce", "own_products", "own_steps", "overlap"}


def test_every_part_runs_on_cpu_tensors(tmp_path):
    arguments = ["gpu", "--device", "cpu", "--smoke", "--out", str(tmp_path / "new")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "new" / "gpu.json").read_text())
    sections = {section["name"]: section for section in data["sections"]}
    assert list(sections) == [part.name for part in PARTS]
    assert all(section["rows"] or name in NEEDS_DEVICE for name, section in sections.items())
    assert {row[-1] for row in sections["correctness"]["rows"]} == {"0"}  # none is wrong
    assert set(sections["steps"]["data"]["us"]) == {"none", "smddp", "gloo"}
    text = (tmp_path / "new" / "gpu.md").read_text()
    assert text.count("\n## ") == len(PARTS)
    assert (tmp_path / "new" / "gpu_trace_steps_smddp.json.gz").stat().st_size
    assert not list((tmp_path / "new").glob("gpu_stacks*"))


def test_parts_that_fail_or_come_late_leave_their_reason(tmp_path):
    def works(bench, section):
        section.columns, section.rows = ("name", "time"), [("one", "2")]

    def fails(bench, section):
        raise JobError("rank 1 ended")

    def errs(bench, section):
        works(bench, section)
        raise KeyError("a mistake")

    def is_late(bench, section):
        bench._deadline = bench._end = 0.0
        bench.remaining_s()

    calls = {"fails": fails, "errs": errs, "works": works, "is_late": is_late, "skipped": works}
    with Bench(GpuPlan(device="cpu"), tmp_path) as bench:
        bench.run([Part(name, "", call, 9.0) for name, call in calls.items()])
    sections = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    errors = [section["error"] for section in sections]
    assert errors[0] == "rank 1 ended"
    assert "a mistake" in errors[1]
    assert sections[1]["rows"] == [["one", "2"]]
    assert errors[2] == ""
    assert "over" in errors[3]
    assert errors[4] == "skipped: 420 s were over"
    assert "| one | 2 |" in (tmp_path / "gpu.md").read_text()


def test_the_floor_is_the_slower_of_copies_and_reduction():
    copies = {"down, one rank": 9.0, "down + up, all ranks": 3.0}
    assert floor_us({"pinned": copies, "core": {"1": 5.0, "2": 4.0}}, 20, 10) == 8.0
    assert floor_us({"registered": copies, "core": {}}, 10, 10) == 3.0
    assert floor_us({}, 10, 10) is None


def test_a_reduction_is_hidden_while_kernels_run():
    def event(kind, name, begin, end, nbytes=0):
        return {
            "cat": kind,
            "name": name,
            "ts": begin,
            "dur": end - begin,
            "args": {"bytes": nbytes},
        }

    events = [
        event("kernel", "gemm", 0.0, 12.0),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 10.0, 11.0, 8),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 11.0, 13.0, 8),
        event("kernel", "gemm", 14.0, 15.0),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 16.0, 17.0, 8),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 18.0, 20.0, 8),
        event("cpu_op", "Memcpy DtoH", 30.0, 31.0, 8),
    ]
    assert share_of(events) == {"communication_us": 10.0, "hidden": 0.3}
    assert share_of(events[:1]) == {}


def test_an_unknown_part_is_refused():
    result = CliRunner().invoke(app, ["gpu", "--parts", "nothing"])
    assert result.exit_code == 2
    assert "no part nothing" in result.output
