"""The command lines in README and docs are ones that the commands accept.

Other tests run the commands: `sdp` in tests/launch, doctor, top, flight and trace, the benchmarks
in tests/benchmarks, `make` in CI.
"""

from __future__ import annotations

import re
from importlib.metadata import metadata
from typing import Any

import pytest
import typer

from benchmarks.cli import app as benchmarks
from benchmarks.overlap import __file__ as overlap
from sdp_plugins.doctor.cli import parser as doctor
from sdp_plugins.launch.cli import app as sdp
from sdp_plugins.top.cli import parser as top
from tests.docs.pages import ROOT, commands

COMMANDS = commands()


def parse(app: typer.Typer, words: list[str]) -> None:
    """Have a command line parsed, but not run; raises what click raises if it is wrong."""
    group: Any = typer.main.get_command(app)
    context = group.make_context(words[0], words[1:], resilient_parsing=True)
    name, command, rest = group.resolve_command(context, words[1:])
    try:
        command.make_context(name, rest, parent=context)
    except typer.BadParameter as error:
        if "does not exist" not in str(error):  # the reader's files do
            raise


def check_sdp(words: list[str]) -> None:
    if parser := {"top": top, "doctor": doctor}.get(words[1]):
        parser().parse_args(words[2:])
    else:
        parse(sdp, words)


def check_python(words: list[str]) -> None:
    if words[1] != "-m":
        return  # a script of the reader's
    if words[2] == "benchmarks":
        parse(benchmarks, words[2:])
    else:
        assert words[2] == "venv" or overlap.endswith(words[2].replace(".", "/") + ".py")


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z0-9 -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*words[1:]} <= {*" ".join(targets).split()}


def check_pip(words: list[str]) -> None:
    extras = metadata("sdp-plugins").get_all("Provides-Extra")
    for word in words:
        if found := re.fullmatch(r"\.\[(.*)\]", word):
            assert {*found[1].split(",")} <= {*extras}


CHECKS = {
    "sdp": check_sdp,
    "python": check_python,
    "python3": check_python,
    "make": check_make,
    "pip": check_pip,
}


@pytest.mark.parametrize(
    ("page", "words"), COMMANDS, ids=[f"{page}: {' '.join(words)}" for page, words in COMMANDS]
)
def test_a_command_line_is_accepted(page: str, words: list[str]) -> None:
    CHECKS[words[0].rpartition("/")[2]](words)
    scripts = [word for word in words if word.startswith("examples/")]
    assert all((ROOT / script).exists() for script in scripts)


def test_the_page_of_commands_has_all_of_them_and_their_options() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    group: Any = typer.main.get_command(sdp)
    assert {*re.findall(r"`sdp (\w+)`", page)} == {*group.commands}
    described = {*re.findall(r"`(--?[a-z-]+)`", page)} - {"--help"}
    options = [option for each in group.commands["run"].params for option in each.opts]
    options += [option for each in group.commands["run"].params for option in each.secondary_opts]
    spelled = {option for option in options if option.startswith("-")} - {"--nproc_per_node"}
    assert described == spelled


def test_there_are_command_lines() -> None:
    assert len(COMMANDS) > 50
    with pytest.raises(Exception, match="No such option"):
        parse(benchmarks, ["benchmarks", "ddp", "--no-such-option"])
