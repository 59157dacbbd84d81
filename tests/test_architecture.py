"""docs/architecture.md: the functions of its two ways exist, and call what the page says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import sdp_plugins

ROOT = Path(sdp_plugins.__file__).parent
PAGE = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()
HOP = re.compile(r"^\| \d+ \| `(\w+)` \| `([\w./]+)` \| (.*?) \|", re.MULTILINE)
WAYS = ("One gradient", "One failure")

# Hops that no earlier hop calls by name, and what does.
CALLED_BY_OTHERS = {
    "allreduce": "torch's DDP",
    "loop": "the engine's thread begins with it",
    "announce": "the collective that dispatch() selects",
    "zero_copy": "the collective that dispatch() selects",
    "complete_with": "the thread that completes futures",
    "time_out": "every wait of an operation",
    "as_exception": "the bindings, for a Failure that C++ throws",
    "group_failed": "tell_observers()",
    "write_uncaught": "every rank as it starts; its hook is called by Python",
}


def hops(way: str) -> list[tuple[str, str, list[str]]]:
    section = PAGE.split(f"\n## {way}\n")[1].split("\n## ")[0]
    return [
        (name, file, re.findall(r"`(\w+)`", calls)) for name, file, calls in HOP.findall(section)
    ]


def bodies(file: Path, name: str) -> str:
    """The text of all functions with this name in a file."""
    source = file.read_text()
    if file.suffix == ".py":
        nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
        return "\n".join(ast.unparse(node) for node in nodes if node.name == name)
    heads = re.finditer(
        rf"^( *)(?:\w[\w:<>,& ]* )?(?:\w+::)?{name}\([^;{{]*{{$", source, re.MULTILINE
    )
    return "\n".join(source[m.end() : source.index(f"\n{m[1]}}}", m.end())] for m in heads)


@pytest.mark.parametrize("way", WAYS)
def test_each_hop_calls_what_the_page_says(way: str) -> None:
    wrong = [
        (file, name, called)
        for name, file, calls in hops(way)
        for called in calls
        if not re.search(rf"\b{called}\b", bodies(ROOT / file, name))
    ]
    assert not wrong


@pytest.mark.parametrize(("way", "most"), [("One gradient", 12), ("One failure", 6)])
def test_each_hop_is_called_by_an_earlier_one(way: str, most: int) -> None:
    called = set(CALLED_BY_OTHERS)
    for name, _, calls in hops(way):
        assert name in called
        called |= {*calls}
    assert 3 < len(hops(way)) <= most


def test_the_page_stays_short() -> None:
    glossary = PAGE.split("\n## Glossary\n")[1]
    assert len(PAGE.splitlines()) <= 120
    assert glossary.count("\n| ") - 1 <= 25
