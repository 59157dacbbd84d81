"""Command-line options that several commands share, and their common output steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import table
from benchmarks.job import JobError
from benchmarks.libraries import LIBRARIES
from benchmarks.results import Progress

WIDTH = 130  # if the output is not a terminal

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
    """The findings of a benchmark."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""


T = TypeVar("T")
R = TypeVar("R", bound=Reported)


def writable(path: Path | None) -> Path | None:
    """Return a path to write to; before measuring, refuse a path whose folder does not exist."""
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
    """Parse an option; report a ValueError as the user's error."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def show(shown: Table, remarks: list[str], section: str, markdown: Path | None) -> None:
    """Print a table and its remarks, and insert them into a document."""
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
    """Write a report if a path is given."""
    if path:
        path.write_text(json.dumps(data, indent=1) + "\n")


def report(
    run: Callable[[Progress], R],
    table_of: Callable[[R], Table],
    section: str,
    markdown: Path | None,
    json: Path | None,
) -> None:
    """Measure, then print and write the result.

    Args:
        run: Measures; its argument is a function that shows the progress. Returns the report.
        table_of: Converts the report to a table.
        section: The section of `markdown` to replace.
        markdown: The document to update, or None.
        json: The JSON file to write, or None.
    """
    with progress() as tell:
        found = or_exit(lambda: run(tell))
    show(table_of(found), [], section, markdown)
    write_json(json, found.to_json())


@contextmanager
def progress() -> Iterator[Progress]:
    """Tell the user what is measured: in one line of a terminal, or in a line for each text."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield partial(typer.echo, err=True)
        return
    with console.status("starting") as status:
        yield status.update


def or_exit(measure: Callable[[], T]) -> T:
    """Exit with the failed rank's message instead of a traceback."""
    try:
        return measure()
    except JobError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
