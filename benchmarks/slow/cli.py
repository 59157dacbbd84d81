"""The command `slow`."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks import options
from benchmarks.nodes_cli import enter_sandbox
from benchmarks.options import Json, Markdown, Repeats, Steps
from benchmarks.slow import measure, table
from benchmarks.slow.names import MODELS, NAMES
from benchmarks.units import parse_list


def slow(
    mbit: Annotated[str, typer.Option(help="speeds of the links, in Mbit/s")] = "100,1000",
    nodes: Annotated[int, typer.Option(min=2, help="nodes, of one rank each")] = 4,
    models: Annotated[str, typer.Option(help="what to train")] = ",".join(MODELS),
    variants: Annotated[str, typer.Option(help="ways to train")] = ",".join(NAMES),
    repeats: Repeats = 3,
    steps: Steps = 2,
    loss_steps: Annotated[int, typer.Option(min=10, help="steps of the language model")] = 2000,
    seeds: Annotated[int, typer.Option(min=1, help="trainings of each variant")] = 3,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Steps, bytes and losses over slow links (needs root): rounding, local updates, hooks."""
    speeds = tuple(options.parsed(float, text) for text in parse_list(mbit))
    trained = options.parsed(lambda names: measure.known(parse_list(names), MODELS), models)
    ways = options.parsed(lambda names: measure.known(parse_list(names), NAMES), variants)
    plan = measure.SlowPlan(nodes, speeds, trained, ways, repeats, steps, loss_steps, seeds)
    enter_sandbox()
    with options.progress() as tell:
        report = options.or_exit(lambda: measure.run(plan, tell))
    for shown, name in table.tables(report):
        options.show(shown, [], name, markdown)
    options.write_json(json, report.to_json())
