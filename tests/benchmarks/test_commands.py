"""The commands over gloo with tiny sizes: shapes of what they write, never a time."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import bert, collectives, ddp, fsdp, memory, mpi, step, table
from benchmarks import targets as targets
from benchmarks.all_reduce import all_reduce_table
from benchmarks.cli import app
from benchmarks.libraries import select
from benchmarks.results import Measurement, Report
from tests.ranks import HANG_S

pytest.importorskip("torch")
PNG = b"\x89PNG\r\n\x1a\n"


SMALL_MODEL = {"layers": 2, "width": 64, "words": 5000}


def shown(content):
    console = Console(width=200, file=io.StringIO())
    console.print(content)
    return console.file.getvalue()


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.may_leak("fds", reason="matplotlib keeps its font files open")
def test_all_reduce_over_gloo(run, tmp_path):
    document = tmp_path / "doc.md"
    document.write_text("# Mine\n<!-- all_reduce begin -->\nold\n<!-- all_reduce end -->\ntail\n")
    result = run(
        *("all_reduce", "--sizes", "64,4K", "--libraries", "gloo,memcpy"),
        *("--dtype", "float32,bfloat16", "--repeats", "2", "--round-s", "0.01"),
        *("--json", tmp_path / "r.json", "--plot", tmp_path / "r.png", "--markdown", document),
    )
    assert result.exit_code == 0, result.output
    assert "all_reduce, 2 ranks, 1 thread each" in result.output
    data = json.loads((tmp_path / "r.json").read_text())
    cells = [(m["dtype"], m["nbytes"], m["variant"]) for m in data["measurements"]]
    assert cells == [
        (dtype, nbytes, library)
        for dtype in ("float32", "bfloat16")
        for nbytes in (64, 4096)
        for library in ("gloo", "memcpy")
    ]
    for m in data["measurements"]:
        assert len(m["rounds_us"]) == 2
    assert data["versions"]["gloo"].startswith("torch ")
    assert (tmp_path / "r.png").read_bytes().startswith(PNG)
    text = document.read_text()
    assert "old" not in text
    assert text.startswith("# Mine\n<!-- all_reduce begin -->\n")
    assert text.endswith("<!-- all_reduce end -->\ntail\n")
    assert text.count("| gloo ") == 4


def test_a_peer_that_was_asked_for_and_is_missing_fails_the_command(run):
    arguments = ("--sizes", "64", "--repeats", "1", "--round-s", "0.01")
    result = run(
        "all_reduce", "--libraries", "memcpy,openmpi", "--mpi-prefix", "/nowhere", *arguments
    )
    if "not measured: openmpi" in result.output:  # else this machine has an Open MPI
        assert result.exit_code == 1
        assert "memcpy" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("all_reduce", "--libraries", "nccl"), "unknown library"),
        (("all_reduce", "--sizes", "1X"), "is not a size"),
        (("all_reduce", "--dtype", "float8"), "unknown dtype"),
        (("ddp", "--optimizer", "lion"), "unknown optimizer"),
        (("keras", "--backend", "mxnet"), "no backend"),
    ],
)
def test_misuse_is_explained(run, arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_the_former_module_runs_the_benchmarks():
    line = [sys.executable, "-m", "sdp_plugins.bench", "all_reduce", "--help"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert "python -m benchmarks" in done.stderr
    assert "--libraries" in done.stdout


def test_ddp_over_smddp_computes_what_gloo_does(run, tmp_path, monkeypatch):
    monkeypatch.setattr(ddp, "FULL_MODEL", SMALL_MODEL)
    result = run(
        *("ddp", "--layers", "1", "--tokens", "4", "--repeats", "2", "--steps", "2"),
        *("--json", tmp_path / "r.json"),
    )
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "r.json").read_text())
    variants = [m["variant"] for m in data["measurements"]]
    assert variants == ["no_comm", "lower_bound", "gloo", "smddp"]
    assert all(len(m["rounds_us"]) == 2 for m in data["measurements"])
    *_, gloo, smddp = data["measurements"]
    assert gloo["ranks_agree"] and smddp["ranks_agree"] and gloo["times_gloo"] == 1
    found = smddp["gradients"]
    assert found["bitwise_equal"] and found["weights_equal"] and found["largest_gradient"] > 0
    assert "100.0%" in result.output
    assert "bitwise those of gloo" in result.output


def test_smddp_and_core_compute_what_gloo_does(run, tmp_path):
    """Every result is checked in the ranks: a wrong sum would be no measurement."""
    result = run(
        *("all_reduce", "--sizes", "60,4M", "--libraries", "smddp,smddp-unregistered,core"),
        *("--dtype", "float32,float16", "--repeats", "1", "--round-s", "0.01"),
        *("--json", tmp_path / "r.json"),
    )
    assert result.exit_code == 0, result.output
    paths = {
        (m["variant"], m["nbytes"]): m["path"]
        for m in json.loads((tmp_path / "r.json").read_text())["measurements"]
    }
    assert paths["smddp", 4 * 2**20] == "zero-copy"  # share() has moved it
    assert paths["core", 4 * 2**20] == "zero-copy"
    assert paths["smddp-unregistered", 4 * 2**20] == "staged"
    assert len(paths) == 6


def test_fusion(run, tmp_path):
    result = run(
        *("fusion", "--layers", "1", "--repeats", "2", "--threshold", "1M"),
        *("--json", tmp_path / "r.json"),
    )
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "r.json").read_text())
    found = {m["variant"]: m["operations"] for m in data["measurements"]}
    assert set(found) == {"fused", "one by one", "one flat buffer"}
    assert data["facts"]["nbytes"] == 4 * sum(
        p.numel() for p in bert.build(0, layers=1).parameters()
    )
    assert 1 < found["fused"] < found["one by one"] == data["facts"]["gradients"]


def test_collectives(run, tmp_path):
    result = run(
        *("collectives", "--sizes", "64", "--repeats", "2", "--round-s", "0.01"),
        *("--json", tmp_path / "r.json"),
    )
    assert result.exit_code == 0, result.output
    cells = json.loads((tmp_path / "r.json").read_text())["measurements"]
    assert [(cell["operation"], cell["variant"]) for cell in cells] == [
        (operation, backend)
        for operation in collectives.OPERATIONS
        for backend in ("gloo", "smddp")
    ]
    assert all(len(cell["rounds_us"]) == 2 for cell in cells)
    assert "send_and_receive" in result.output


def test_an_unknown_collective_is_refused(run):
    result = run("collectives", "--operations", "all_reduce,median")
    assert result.exit_code == 2
    assert "no operation median" in result.output


@pytest.mark.long
def test_fsdp_over_smddp_computes_what_gloo_does():
    report = fsdp.run(ddp.DdpPlan(rounds=1, steps=2, tokens=4, model=SMALL_MODEL))
    assert report.facts["largest_difference"] == 0
    assert "1 thread each" in shown(fsdp.fsdp_table(report))


def small_steps(*variants):
    plan = ddp.DdpPlan(variants, rounds=1, steps=1, tokens=4, model=SMALL_MODEL)
    report = step.run(plan)
    assert all(each.facts["memory"] > 0 for each in report.measurements)
    return shown(step.step_table(report))


def test_a_step_in_shards(monkeypatch):
    monkeypatch.setattr(step, "memory", lambda plan, progress: dict.fromkeys(plan.backends, 1.0))
    assert "all ranks alike" in small_steps("none", "sharded")


@pytest.mark.long
def test_steps_of_every_way():
    assert "bitwise those of smddp" in small_steps(*step.VARIANTS)


def test_ranks_that_cannot_be_divided_among_nodes_are_refused(run):
    result = run("step", "--nodes", "2", "--ranks", "3")
    assert result.exit_code == 2
    assert "3 ranks cannot be divided among 2 nodes" in result.output


def test_an_unknown_way_is_refused(run):
    result = run("step", "--variants", "none,horovod")
    assert result.exit_code == 2
    assert "no variant horovod" in result.output


@pytest.mark.long
def test_memory_has_an_entry_per_backend_and_rank():
    report = memory.run(ddp.DdpPlan(tokens=4, model=SMALL_MODEL))
    assert [job.backend for job in report.jobs] == ["gloo", "smddp"]
    for job in report.jobs:
        assert len(job.ranks) == 2
        assert all(rank.rss > 100 * 2**20 for rank in job.ranks)  # torch alone has more
    text = shown(memory.memory_table(report))
    assert "gloo" in text
    assert "smddp" in text


def test_former_names_still_work(run):
    result = run("bars", "--repeats", "0")
    assert "bars is now called targets" in result.output
    assert result.exit_code == 2
    assert run("all_reduce", "--peers", "nccl").exit_code == 2
    assert select(["floor"]) == select(["lower_bound"])


def test_a_report_that_cannot_be_written_is_refused_at_once(run, tmp_path):
    for option in ("--json", "--plot"):
        result = run("all_reduce", option, tmp_path / "missing" / "report")
        assert result.exit_code == 2
        assert "there is no folder" in result.output
    assert run("ddp", "--markdown", tmp_path / "missing.md").exit_code == 2


def test_a_backend_that_does_not_exist_ends_the_command_with_its_words(run, monkeypatch):
    monkeypatch.setattr(ddp, "FULL_MODEL", SMALL_MODEL)
    result = run("ddp", "--backends", "nonsense", "--layers", "1", "--repeats", "1")
    assert result.exit_code == 1
    assert "nonsense" in result.output


@pytest.mark.skipif(not mpi.discover(), reason="no MPI here")
def test_mpi_is_started_by_its_own_mpiexec(run, tmp_path):
    result = run(
        *("all_reduce", "--sizes", "60,64K", "--libraries", "mpi,gloo", "--repeats", "1"),
        *("--round-s", "0.01", "--json", tmp_path / "r.json"),
    )
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "r.json").read_text())
    assert [m["variant"] for m in data["measurements"]] == ["mpi", "gloo"] * 2
    assert "MPI" in data["versions"]["mpi"]


def test_the_table_of_bars_tells_all_three_verdicts():
    rows = [targets.Target("a", "b", "c", "others", reached) for reached in (True, False, None)]
    text = shown(targets.targets_table(rows))
    for words in ("reached", "missed", "not measured"):
        assert text.count(words) == 1
    assert text.count("others ") == 2  # the column's name and the first row; then "as above"
    assert [target["reached"] for target in targets.to_json(rows)["targets"]] == [True, False, None]


def test_markdown_tables_have_one_line_per_row(tmp_path):
    settings = {"ranks": 4, "threads": 1, "rounds": 1}
    case = {"operation": "all_reduce", "dtype": "float32", "ranks": 4}
    facts = {"path": "", "reduces": True}
    rows = [Measurement("gloo", (n / 10,), case | {"nbytes": n}, facts) for n in (4, 8)]
    report = Report("all_reduce", settings, {"cpu": "some", "cores": 2}, rows)
    text = table.to_markdown(all_reduce_table(report))
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    document = tmp_path / "doc.md"
    document.write_text("no section")
    with pytest.raises(ValueError, match="all_reduce begin"):
        table.replace_section(document, "all_reduce", text)
