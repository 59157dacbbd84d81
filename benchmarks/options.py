"""Command-line options that several commands share, and what all of them do at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import table
from benchmarks.job import RankError
from benchmarks.libraries import LIBRARIES

WIDTH = 130  # where the output is no terminal

Ranks = Annotated[int, typer.Option(min=1, help="processes per job")]
Libraries = Annotated[
    str,
    typer.Option(
        "--libraries",
        "--peers",
        metavar="NAMES",
        help=", ".join(LIBRARIES) + "; --peers is the old name",
    ),
]
Threads = Annotated[int, typer.Option(min=1, help="threads per rank")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="turns of each variant")]
Steps = Annotated[int, typer.Option(min=1, help="timed steps in a turn")]
RoundS = Annotated[float, typer.Option(help="approximate duration of a turn, in seconds")]
Prefixes = Annotated[
    list[Path],
    typer.Option(
        "--mpi-prefix", exists=True, help="folder in which an MPI is installed; may be repeated"
    ),
]


class Reported(Protocol):
    """What a benchmark has found."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""


T = TypeVar("T")
R = TypeVar("R", bound=Reported)


def writable(path: Path | None) -> Path | None:
    """A path to write to, refused before anything is measured if it has no folder."""
    if path and not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(path.parent)!r}")
    return path


Json = Annotated[
    Path | None, typer.Option("--json", callback=writable, help="write everything as JSON")
]
Plot = Annotated[Path | None, typer.Option(callback=writable, help="write a log-log plot as PNG")]
Markdown = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="replace the generated section of this Markdown file"
    ),
]


def parsed(parse: Callable[[str], T], text: str) -> T:
    """What a parser makes of an option; its ValueError is the user's mistake."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def show(shown: Table, remarks: list[str], section: str, markdown: Path | None) -> None:
    """Print a table and its remarks, and put them into a document."""
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(shown)
    for remark in remarks:
        console.print(remark, style="dim", markup=False, highlight=False)
    if markdown:
        text = table.to_markdown(shown) + "\n" + "".join(f"- {remark}\n" for remark in remarks)
        table.replace_section(markdown, section, text)


def write_json(path: Path | None, data: dict[str, Any]) -> None:
    """Write a report if a path was given."""
    if path:
        path.write_text(json.dumps(data, indent=1) + "\n")


def report(
    run: Callable[[Callable[[str], None]], R],
    table_of: Callable[[R], Table],
    section: str,
    markdown: Path | None,
    json: Path | None,
) -> None:
    """Measure, and show and write what was found.

    Args:
        run: Given what to call with the state of things, returns the report.
        table_of: The report as a table.
        section: Of `markdown`.
        markdown: See `show`.
        json: See `write_json`.
    """
    with Console(stderr=True).status("starting") as status:
        found = or_exit(lambda: run(status.update))
    show(table_of(found), [], section, markdown)
    write_json(json, found.to_json())


def or_exit(measure: Callable[[], T]) -> T:
    """End with the failed rank's words instead of a traceback of ours."""
    try:
        return measure()
    except RankError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
