"""The commands that emulate several nodes on this machine (they need root)."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks import mpi, options, runner
from benchmarks import nodes as nodes_of
from benchmarks.libraries import select
from benchmarks.options import Json, Libraries, Markdown, Prefixes, Repeats, RoundS, Steps
from benchmarks.scaling import measure as scaling_of
from benchmarks.scaling import plan as scaling_plan
from benchmarks.scaling import table as scaling_table
from benchmarks.testbed import program, sandbox
from benchmarks.testbed.network import Network
from benchmarks.units import parse_list, parse_size

DEFAULT_LAYOUTS = "2x1,2x2,2x4,4x1,4x2"
DEFAULT_SCALING_LAYOUTS = "2x1,4x1,8x1,2x2,4x2"
DEFAULT_NODE_LIBRARIES = "gloo,mpich,openmpi,smddp-gloo,smddp-mpich,smddp-openmpi"


def nodes(
    layouts: Annotated[str, typer.Option(help="nodes x ranks of each")] = DEFAULT_LAYOUTS,
    gbit: Annotated[str, typer.Option(help="speeds of the links, in Gbit/s")] = "1,2",
    size: Annotated[str, typer.Option(help="bytes per rank; K, M, G are binary")] = "25M",
    libraries: Libraries = DEFAULT_NODE_LIBRARIES,
    repeats: Repeats = 5,
    round_s: RoundS = 0.2,
    mpi_prefix: Prefixes = [],  # noqa: B006  read only
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """all_reduce across nodes of a testbed (needs root), against the limit of the wire."""
    shapes = [options.parsed(nodes_of.Layout.parse, text) for text in parse_list(layouts)]
    speeds = [options.parsed(float, text) for text in parse_list(gbit)]
    nbytes = options.parsed(parse_size, size)
    chosen = options.parsed(lambda names: select(parse_list(names)), libraries)
    effort = runner.Plan(rounds=repeats, round_s=round_s)
    enter_sandbox()
    mpis, rows = mpi.discover(mpi_prefix), []
    with options.progress() as tell:
        for shape in shapes:
            for speed in speeds:
                rows.append(nodes_of.run(shape, speed, nbytes, chosen, mpis, effort, tell))
    options.show(
        nodes_of.nodes_table(rows, nbytes, repeats), nodes_of.notes(rows), "nodes", markdown
    )
    options.write_json(json, nodes_of.to_json(rows))


def scaling(
    models: Annotated[str, typer.Option(help="what to train")] = ",".join(scaling_plan.MODELS),
    layouts: Annotated[str, typer.Option(help="nodes x ranks of each")] = DEFAULT_SCALING_LAYOUTS,
    gbit: Annotated[
        float | None,
        typer.Option(min=0.001, help="speed of the links; else gloo's share of its step decides"),
    ] = None,
    repeats: Repeats = 5,
    steps: Steps = 3,
    mpi_prefix: Prefixes = [],  # noqa: B006  read only
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Training under DDP across nodes of a testbed (needs root): gloo, smddp, smddp over MPI."""
    chosen = [options.parsed(scaling_plan.known_model, name) for name in parse_list(models)]
    shapes = [options.parsed(nodes_of.Layout.parse, text) for text in parse_list(layouts)]
    plans = [
        scaling_plan.ScalingPlan(model, scaling_plan.MODELS[model], shape, gbit, repeats, steps)
        for model in chosen
        for shape in shapes
    ]
    enter_sandbox()
    found = next(iter(mpi.discover(mpi_prefix)), None)
    with options.progress() as tell:
        rows = options.or_exit(lambda: [scaling_of.run(plan, found, tell) for plan in plans])
    shown = scaling_table.scaling_table(rows, repeats)
    options.show(shown, scaling_table.notes(rows), "scaling", markdown)
    options.write_json(json, scaling_table.to_json(rows))


def cluster(
    line: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="what all ranks run")],
    nodes: Annotated[int, typer.Option(min=1, max=250)] = 2,
    ranks_per_node: Annotated[int, typer.Option(min=1)] = 1,
    gbit: Annotated[float, typer.Option(min=0.001, help="speed of each node's link")] = 1.0,
    launcher: Annotated[str, typer.Option(help="torchrun or mpirun")] = "torchrun",
    mpi_prefix: Prefixes = [],  # noqa: B006  read only
) -> None:
    """Run a command on the ranks of several nodes that this machine plays (needs root).

    The nodes are called node0, node1, ...; their links have the given speed in each direction.
    Nothing is left of them, however this ends.
    """
    if launcher not in ("torchrun", "mpirun"):
        raise typer.BadParameter(f"there is no launcher {launcher!r}: torchrun or mpirun")
    enter_sandbox()
    found = one_mpi(mpi_prefix) if launcher == "mpirun" else None
    with Network(nodes, gbit) as network:
        status = program.run(network, ranks_per_node, line, found)
    raise typer.Exit(status if status >= 0 else 128 - status)


def one_mpi(prefixes: Prefixes) -> mpi.MpiInstall:
    """Return the first MPI found; without one, end the command."""
    found = mpi.discover(prefixes)
    if not found:
        what = "mpirun needs mpi4py where this runs, and an MPI there or under --mpi-prefix"
        typer.echo(f"error: {what}. Hint: pip install mpi4py mpich", err=True)
        raise typer.Exit(1)
    return found[0]


def enter_sandbox() -> None:
    """Enter separate namespaces, or end the command."""
    try:
        sandbox.enter()
    except OSError as error:
        typer.echo(f"error: there can be no nodes on this machine: {error}", err=True)
        raise typer.Exit(1) from None
