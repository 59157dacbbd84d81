"""The command `predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks import options
from benchmarks.options import Json, Markdown
from benchmarks.predict import table
from benchmarks.predict.costs import with_options
from benchmarks.predict.gradients import MODELS, sizes_of
from benchmarks.predict.simulation import Setting, run, scales


def predict(
    nodes: Annotated[int, typer.Option(min=2, help="the most nodes of the curves")] = 4096,
    ranks_per_node: Annotated[int, typer.Option(min=1)] = 8,
    model: Annotated[str, typer.Option(help=", ".join(MODELS))] = "bert-large",
    compute_ms: Annotated[
        float, typer.Option(min=0.001, help="forward and backward pass of a rank")
    ] = 300.0,
    jitter: Annotated[
        float, typer.Option(min=0, help="relative standard deviation of a node's computing")
    ] = 0.02,
    steps: Annotated[int, typer.Option(min=1, help="steps of which the mean is taken")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="of what delays nodes")] = 0,
    gbit: Annotated[
        float | None, typer.Option(min=0.001, help="speed of a node's link, in Gbit/s")
    ] = None,
    latency_us: Annotated[
        float | None, typer.Option(min=0.001, help="of a small message between nodes")
    ] = None,
    message_us: Annotated[
        float | None, typer.Option(min=0.001, help="of each message while others are on the wire")
    ] = None,
    node_gbs: Annotated[
        float | None, typer.Option(min=0.001, help="1e9 bytes per second that a node reduces")
    ] = None,
    local_us: Annotated[
        float, typer.Option(min=0, help="of the ring's hops inside of a node")
    ] = 5.0,
    json: Json = None,
    plot: Annotated[
        Path | None,
        typer.Option(callback=options.writable, help="write the efficiencies' curves as PNG"),
    ] = None,
    markdown: Markdown = None,
) -> None:
    """Simulate training on up to thousands of nodes: smddp, a ring, parameter servers."""
    options.parsed(sizes_of, model)
    setting = Setting(
        model=model,
        ranks_per_node=ranks_per_node,
        compute_s=compute_ms / 1e3,
        jitter=jitter,
        steps=steps,
        seed=seed,
        local_s=local_us * 1e-6,
    )
    costs = with_options(gbit, latency_us, message_us, node_gbs)
    rows = []
    with options.progress() as tell:
        for count in scales(nodes):
            tell(f"{count} nodes")
            rows.append(run(setting, costs, count))
    shown = table.predict_table(rows, setting)
    options.show(shown, table.notes(setting, costs), "predict", markdown)
    options.write_json(json, table.to_json(rows, setting, costs))
    if plot:
        from benchmarks.predict.plot import draw  # matplotlib takes a second to import

        draw(rows, setting, costs, plot)
