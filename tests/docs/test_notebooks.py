"""The tutorials run as they are stored, and come to what they show."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.launch.jobs import ROOT, launch_page

TUTORIALS = ROOT / "docs" / "tutorials"
LIMIT_S = 600  # a cell needs less than 60 s where other tests run as well
ACCURACY = re.compile(r"accuracy: ([\d.]+)%")


def written(notebook: nbformat.NotebookNode) -> list[str]:
    """What each code cell has written; ours have no other output."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert {output.output_type for cell in cells for output in cell.outputs} == {"stream"}
    return ["".join(output.text for output in cell.outputs) for cell in cells]


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize(
    ("name", "trainings", "least"), [("lightning", 1, 75), ("keras", 2, 75), ("huggingface", 2, 60)]
)
def test_a_notebook_comes_to_what_it_shows(
    name: str, trainings: int, least: float, tmp_path: Path
) -> None:
    notebook = nbformat.read(TUTORIALS / f"{name}.ipynb", as_version=4)
    stored = written(notebook)
    folder = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=LIMIT_S, resources=folder)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"SDP_TIMEOUT_S": "300", "PATH": programs}
    asyncio.run(client.async_execute(env=environment))  # raises a cell's error
    found = written(notebook)
    for shown, now in zip(stored, found, strict=True):
        assert bool(shown) == bool(now), now
        assert re.findall(r"\d ranks over \w+", shown) == re.findall(r"\d ranks over \w+", now)
    for outputs in (stored, found):
        accuracies = [float(number) for number in ACCURACY.findall("".join(outputs))]
        assert len(accuracies) == trainings and min(accuracies) > least
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_shows_nothing_of_a_machine(path: Path) -> None:
    text = "".join(written(nbformat.read(path, as_version=4)))
    assert not re.search(r"(?i)/\w+/\w+|warning|traceback|\x1b", text), text


def test_the_program_for_torch_prints_what_its_page_shows(tmp_path: Path) -> None:
    page = (TUTORIALS / "torch.md").read_text()
    shown = re.findall(r"\$ sdp run -n 2 train\.py (\w+)\n(.*)\n```", page)
    assert [backend for backend, _ in shown] == ["smddp", "gloo"]
    for backend, line in shown:
        done = launch_page("tutorials/torch.md", tmp_path, arguments=(backend,))
        assert done.returncode == 0, done.stderr
        loss, accuracy = re.findall(r"loss ([\d.]+), ([\d.]+)%", done.stdout)[0]
        assert float(accuracy) > 75 and float(loss) < 0.2
        # The figures differ a little between processors.
        assert re.sub(r"loss.*%", "", done.stdout) == re.sub(r"loss.*%", "", line) + "\n"
