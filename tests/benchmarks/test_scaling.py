"""Training across nodes: the search for a speed, the detector, the table; a real run as root."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.nodes import Layout
from benchmarks.results import Measurement, Report
from benchmarks.scaling import link_speed, measure, plan, table
from benchmarks.scaling.link_speed import AIM, CLOSE_ENOUGH, GBIT, MOST_TRIES, Trial
from benchmarks.testbed import network
from tests.nodes import needs_nodes
from tests.ranks import HANG_S

torch = pytest.importorskip("torch")
from benchmarks import bert, ddp_task  # noqa: E402
from benchmarks.scaling import detection  # noqa: E402  these import torch

PAYLOAD = 40e6
SMALL = {"rows": 2, "side": 64, "model": {"width": 8, "blocks": [1, 1, 2, 1], "channels": 16}}


# ---- The speed of the links ---------------------------------------------------------------------


class Steps:
    """A step in which some of what is on the wire hides behind computing; counts its trials."""

    def __init__(self, hidden_s: float = 0.0, added_s: float = 0.0, no_comm_s: float = 0.5) -> None:
        self.hidden_s, self.added_s, self.no_comm_s = hidden_s, added_s, no_comm_s
        self.tried: list[float] = []

    def __call__(self, gbit: float) -> Trial:
        self.tried.append(gbit)
        wire_s = PAYLOAD * 8e-9 / gbit
        exposed_s = max(0.0, wire_s - self.hidden_s) + self.added_s
        return Trial(gbit, self.no_comm_s, self.no_comm_s + exposed_s)


@pytest.mark.parametrize("hidden_s", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("added_s", [0.0, 0.3])
def test_the_search_converges(hidden_s: float, added_s: float) -> None:
    steps = Steps(hidden_s, added_s)
    found = link_speed.search(steps, PAYLOAD, steps.no_comm_s)
    assert abs(found.share - AIM) <= CLOSE_ENOUGH
    assert len(steps.tried) <= MOST_TRIES


def test_without_overlap_the_estimate_is_right_at_once() -> None:
    steps = Steps()
    link_speed.search(steps, PAYLOAD, steps.no_comm_s)
    assert len(steps.tried) == 1


def test_a_wrong_no_comm_time_is_corrected() -> None:
    steps = Steps(hidden_s=0.1)
    found = link_speed.search(steps, PAYLOAD, no_comm_s=0.05)
    assert abs(found.share - AIM) <= CLOSE_ENOUGH


@pytest.mark.parametrize("added_s", [1.0, 10.0])
def test_a_share_that_no_speed_gives_ends_the_search_with_the_nearest(added_s: float) -> None:
    steps = Steps(added_s=added_s)
    found = link_speed.search(steps, PAYLOAD, steps.no_comm_s)
    assert found.gbit == max(steps.tried) <= GBIT[1]
    assert len(steps.tried) <= MOST_TRIES


def test_speeds_stay_within_what_links_can_have() -> None:
    assert link_speed.estimate(1.0, 100.0) == GBIT[0]
    assert link_speed.estimate(1e12, 0.001) == GBIT[1]


def test_links_get_another_speed_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(network, "_run", lambda line: lines.append(line) or "")
    nodes = network.Network(2, 1.0)
    nodes.set_speed(0.25)
    assert nodes.gbit == 0.25
    assert len(lines) == 4 and all("replace" in line and "250000kbit" in line for line in lines)
    assert len(set(lines)) == 4


# ---- The detector -------------------------------------------------------------------------------


def test_the_detector_has_many_small_gradients_and_all_take_part() -> None:
    workload = detection.Workload(plan.MODELS["detection"])
    model = workload.build()
    model(*workload.batch(0, 0)).backward()
    parameters = list(model.parameters())
    assert len(parameters) > 150
    assert sorted(p.numel() for p in parameters)[len(parameters) // 2] <= 512
    assert all(p.grad is not None and p.grad.isfinite().all() for p in parameters)
    assert all(p.grad.abs().max() > 0 for p in parameters if p.grad is not None)


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        (detection.Workload, SMALL),
        (
            bert.Workload,
            {"rows": 2, "tokens": 4, "model": {"layers": 1, "width": 64, "words": 99}},
        ),
    ],
)
def test_weights_and_batches_depend_on_rank_and_step_only(
    kind: type[ddp_task.Workload], setting: dict[str, object]
) -> None:
    one, other = kind(setting), kind(setting)  # type: ignore[call-arg]
    weights = [list(workload.build().parameters()) for workload in (one, other)]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    same = zip(one.batch(3, 1), other.batch(3, 1), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    for step, rank in ((3, 2), (4, 1)):
        assert not torch.equal(one.batch(3, 1)[0], one.batch(step, rank)[0])


def test_places_in_no_box_are_background_and_the_smallest_box_counts() -> None:
    boxes = torch.tensor([[[0.0, 0, 32, 32], [16, 16, 32, 32]]])
    labels = torch.tensor([[3, 5]])
    places = torch.tensor([[4.0, 4], [20, 20], [40, 40]])
    classes, distances = detection._targets(places, 8, boxes, labels)
    assert classes.tolist() == [[3, 5, detection.CLASSES]]
    assert (distances[0, 0] * 8).tolist() == [4, 4, 28, 28]
    assert (distances[0, 1] * 8).tolist() == [4, 4, 12, 12]


@pytest.mark.long
def test_the_detector_learns() -> None:
    workload = detection.Workload(SMALL)
    model, batch = workload.build(), workload.batch(0, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# ---- The command --------------------------------------------------------------------------------


def row(layout: str, gloo_ms: float, difference: float = 0.0) -> measure.Row:
    rounds_ms = {"no_comm": 100.0, "gloo": gloo_ms, "smddp": 125.0}
    gradients = {
        "bitwise_equal": not difference,
        "largest_difference": difference,
        "largest_gradient": 10.0,
    }
    facts: dict[str, dict[str, object]] = {
        "no_comm": {},
        "gloo": {"ranks_agree": True},
        "smddp": {"ranks_agree": difference < 1, "gradients": gradients},
    }
    found = Report("scaling", {}, {}, facts={"parameters": 2_500_000})
    for name, ms in rounds_ms.items():
        found.measurements.append(Measurement(name, (1e3 * ms,) * 2, facts=facts[name]))
    return measure.Row("bert", Layout.parse(layout), 0.5, 77, found)


def test_the_table_and_its_notes() -> None:
    rows = [row("2x1", 200.0), row("4x2", 1000.0, 1e-6), row("2x2", 150.0, 5.0)]
    console = Console(width=130, file=io.StringIO())
    console.print(table.scaling_table(rows, 2))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    assert lines[5][:6] == ["bert", "2x1", "0.5", "50%", "no_comm", "100"]
    (first, second, third) = [line for line in lines if line and line[0] == "smddp"]
    assert first[-4:] == ["80.0%", "1.60", "equal", "equal"]
    assert second[-4:] == ["8.00", "equal", "within", "1e-07"]
    assert third[-3:] == ["DIFFER", "within", "5e-01"]
    notes = table.notes(rows)
    assert notes[0] == "bert: 77 gradients, 2.5 M parameters"
    assert len(notes) == 2 and "bert on 4x2" in notes[1]
    data = json.loads(json.dumps(table.to_json(rows)))
    assert [cell["layout"] for cell in data["rows"]] == ["2x1", "4x2", "2x2"]
    assert data["rows"][0]["gloo_share"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--layouts", "2"), "is not a layout"), (("--models", "gpt"), "unknown model")],
)
def test_misuse_is_explained(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(app, ["scaling", *arguments])
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.long
@needs_nodes
def test_two_nodes_train(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    bench = [sys.executable, "-m", "benchmarks", "scaling"]
    options = ["--layouts", "2x1", "--models", "detection", "--repeats", "1", "--steps", "1"]
    done = subprocess.run(
        [*bench, *options, "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (cell,) = json.loads(path.read_text())["rows"]
    assert cell["gbit"] > 0
    found = cell["found"]
    no_comm, gloo, smddp = found["measurements"]
    assert [m["variant"] for m in (no_comm, gloo, smddp)] == ["no_comm", "gloo", "smddp"]
    assert gloo["ranks_agree"] and smddp["ranks_agree"]
    # Of two ranks there is only one order to sum in.
    assert smddp["gradients"]["bitwise_equal"]
    assert smddp["gradients"]["largest_gradient"] > 0
