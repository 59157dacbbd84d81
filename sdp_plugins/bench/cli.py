"""The command line of the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from sdp_plugins.bench import bars as bars_of
from sdp_plugins.bench import collectives as collectives_of
from sdp_plugins.bench import ddp as training
from sdp_plugins.bench import fsdp as fsdp_of
from sdp_plugins.bench import fusion as fusion_of
from sdp_plugins.bench import keras as keras_of
from sdp_plugins.bench import machine, mpi, options, runner, scaling_plan, scaling_table, table
from sdp_plugins.bench import memory as memory_of
from sdp_plugins.bench import nodes as nodes_of
from sdp_plugins.bench import scaling as scaling_of
from sdp_plugins.bench.cluster import program, sandbox
from sdp_plugins.bench.cluster.network import Network
from sdp_plugins.bench.job import RankError
from sdp_plugins.bench.options import (
    Json,
    Markdown,
    Plot,
    Prefixes,
    Ranks,
    Repeats,
    RoundS,
    Threads,
)
from sdp_plugins.bench.peers import PEERS, select
from sdp_plugins.bench.predict_cli import predict
from sdp_plugins.bench.results import Report
from sdp_plugins.bench.units import parse_list, parse_size
from sdp_plugins.bench.values import DTYPES


class _Reported(Protocol):
    def to_json(self) -> dict[str, Any]: ...


T = TypeVar("T")
R = TypeVar("R", bound=_Reported)
app = typer.Typer(no_args_is_help=True, add_completion=False)
DEFAULT_SIZES = "4K,64K,1M,25M,100M"
DEFAULT_LAYOUTS = "2x1,2x2,2x4,4x1,4x2"
DEFAULT_SCALING_LAYOUTS = "2x1,4x1,8x1,2x2,4x2"
DEFAULT_NODE_PEERS = "gloo,mpich,openmpi,smddp-gloo,smddp-mpich,smddp-openmpi"
DEFAULT_PEERS = "gloo,smddp,core,mpi,floor,memcpy"

Backends = Annotated[str, typer.Option(help="backends of torch.distributed")]
Rows = Annotated[int, typer.Option(min=1, help="sequences per rank and step")]
Tokens = Annotated[int, typer.Option(min=1, max=512, help="length of a sequence")]
BucketView = Annotated[bool, typer.Option(help="DDP's gradient_as_bucket_view")]
Layers = Annotated[int, typer.Option(min=1, help="of the model; 8 make BERT-Medium")]
Steps = Annotated[int, typer.Option(min=1, help="timed steps in a turn")]


def _optimizer(name: str) -> str:
    if name not in training.OPTIMIZERS:
        raise typer.BadParameter(f"unknown optimizer {name!r}: sgd or adamw")
    return name


Optimizer = Annotated[str, typer.Option(callback=_optimizer, help="sgd or adamw; part of the step")]


@app.callback()
def main() -> None:
    """Compare smddp with gloo and MPI, alternating in one run."""
    if text := machine.busy():
        typer.echo(f"warning: {text}", err=True)


@app.command("all_reduce")
def all_reduce(
    sizes: Annotated[str, typer.Option(help="bytes per rank; K, M, G are binary")] = DEFAULT_SIZES,
    ranks: Ranks = 2,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "float32",
    peers: Annotated[str, typer.Option(help=", ".join(PEERS))] = DEFAULT_PEERS,
    registered: Annotated[
        bool,
        typer.Option(
            "--registered/--unregistered", help="smddp and core in memory that their peers can map"
        ),
    ] = True,
    threads: Threads = 1,
    repeats: Repeats = 7,
    round_s: RoundS = 0.2,
    mpi_prefix: Prefixes = [],  # noqa: B006  read only
    json: Json = None,
    plot: Plot = None,
    markdown: Markdown = None,
) -> None:
    """Latency, algorithm and bus bandwidth of all_reduce, against gloo."""
    plan = runner.Plan(
        nbytes=tuple(options.parsed(parse_size, size) for size in parse_list(sizes)),
        dtypes=tuple(options.parsed(_known_dtype, name) for name in parse_list(dtype)),
        ranks=ranks,
        threads=threads,
        rounds=repeats,
        round_s=round_s,
    )
    chosen = options.parsed(lambda names: select(parse_list(names), registered=registered), peers)
    with Console(stderr=True).status("starting") as status:
        report = runner.run(plan, chosen, mpi.discover(mpi_prefix), status.update)
    options.show(table.collective_table(report), table.notes(report), "all_reduce", markdown)
    options.write_json(json, report.to_json())
    if plot:
        from sdp_plugins.bench.plot import draw  # matplotlib takes a second to import

        draw(report, plot)
    _judge(report, asked=peers != DEFAULT_PEERS)


@app.command("ddp")
def ddp(
    backends: Backends = "gloo,smddp",
    ranks: Ranks = 2,
    threads: Threads = 1,
    repeats: Repeats = 7,
    steps: Steps = 3,
    rows: Rows = 1,
    tokens: Tokens = 64,
    layers: Layers = 8,
    optimizer: Optimizer = "sgd",
    bucket_view: BucketView = False,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Training step of a 41 M parameter BERT under DDP: silent, then over each backend."""
    plan = training.DdpPlan(
        backends=tuple(parse_list(backends)),
        ranks=ranks,
        threads=threads,
        rounds=repeats,
        steps=steps,
        rows=rows,
        tokens=tokens,
        optimizer=optimizer,
        bucket_view=bucket_view,
        model={**training.FULL_MODEL, "layers": layers},
    )
    _report(partial(training.run, plan), training.ddp_table, "ddp", markdown, json)


@app.command("collectives")
def collectives(
    operations: Annotated[
        str, typer.Option(help="some of " + ", ".join(collectives_of.OPERATIONS))
    ] = ",".join(collectives_of.OPERATIONS),
    sizes: Annotated[str, typer.Option(help="bytes that a rank gives")] = "4K,1M,25M",
    ranks: Ranks = 2,
    threads: Threads = 1,
    repeats: Repeats = 7,
    round_s: RoundS = 0.1,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Every collective of torch.distributed, over gloo and smddp."""
    names = tuple(parse_list(operations))
    if unknown := set(names) - set(collectives_of.OPERATIONS):
        raise typer.BadParameter(f"there is no operation {', '.join(sorted(unknown))}")
    nbytes = tuple(options.parsed(parse_size, size) for size in parse_list(sizes))
    plan = collectives_of.CollectivesPlan(names, nbytes, ranks, threads, repeats, round_s)
    _report(
        partial(collectives_of.run, plan),
        collectives_of.collectives_table,
        "collectives",
        markdown,
        json,
    )


@app.command("fsdp")
def fsdp(
    ranks: Ranks = 2,
    threads: Threads = 1,
    repeats: Repeats = 7,
    steps: Steps = 3,
    rows: Rows = 1,
    tokens: Tokens = 64,
    layers: Layers = 8,
    optimizer: Optimizer = "sgd",
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Training step of the same BERT under FSDP2, over gloo and smddp."""
    plan = training.DdpPlan(
        ranks=ranks,
        threads=threads,
        rounds=repeats,
        steps=steps,
        rows=rows,
        tokens=tokens,
        optimizer=optimizer,
        model={**training.FULL_MODEL, "layers": layers},
    )
    _report(partial(fsdp_of.run, plan), fsdp_of.fsdp_table, "fsdp", markdown, json)


@app.command("memory")
def memory(
    backends: Backends = "gloo,smddp",
    ranks: Ranks = 2,
    layers: Layers = 8,
    bucket_view: BucketView = False,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Memory of that training per rank, over each backend."""
    plan = training.DdpPlan(
        backends=tuple(parse_list(backends)),
        ranks=ranks,
        bucket_view=bucket_view,
        model={**training.FULL_MODEL, "layers": layers},
    )
    _report(partial(memory_of.run, plan), memory_of.memory_table, "memory", markdown, json)


@app.command("fusion")
def fusion(
    ranks: Ranks = 2,
    layers: Layers = 8,
    threshold: Annotated[str, typer.Option(help="size of a fusion buffer")] = "25M",
    repeats: Repeats = 7,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Averaging that model's gradients: in fusion buffers, one by one, as one flat buffer."""
    size = options.parsed(parse_size, threshold)
    plan = fusion_of.FusionPlan(layers, size, ranks, repeats)
    _report(partial(fusion_of.run, plan), fusion_of.fusion_table, "fusion", markdown, json)


@app.command("keras")
def keras(
    backend: Annotated[str, typer.Option(help="tensorflow, torch or jax")] = "tensorflow",
    ranks: Ranks = 2,
    rows: Annotated[int, typer.Option(min=1, help="of the global batch")] = 16,
    layers: Annotated[int, typer.Option(min=1, help="hidden ones")] = 3,
    width: Annotated[int, typer.Option(min=1, help="of the hidden layers")] = 4096,
    repeats: Repeats = 5,
    gbit: Annotated[
        float | None,
        typer.Option(min=0.001, help="each rank on a node with a link of this speed (needs root)"),
    ] = None,
    mpi_prefix: Prefixes = [],  # noqa: B006  read only
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """A training step with Keras, against one without communication, and TensorFlow's strategy."""
    if backend not in keras_of.BACKENDS:
        raise typer.BadParameter(f"there is no backend {backend!r} of Keras", param_hint="backend")
    plan = keras_of.KerasPlan(backend, ranks, rows, layers, width, repeats, gbit=gbit)
    found, section = None, f"keras {backend}"
    if gbit is not None:
        _enter_sandbox()
        found, section = _one_mpi(mpi_prefix), f"{section} on nodes"
    _report(partial(keras_of.run, plan, found), keras_of.keras_table, section, markdown, json)


@app.command("bars")
def bars(
    repeats: Repeats = 9,
    round_s: RoundS = 0.2,
    mpi_prefix: Prefixes = [],  # noqa: B006  read only
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Everything that this library has set itself to reach, with verdicts. Takes minutes."""
    effort, mpis = runner.Plan(rounds=repeats, round_s=round_s), mpi.discover(mpi_prefix)
    with Console(stderr=True).status("starting") as status:
        found = bars_of.collect(mpis, effort, training.DdpPlan(rounds=repeats), status.update)
    remarks = [] if mpis else ["MPI: needs mpi4py here and an MPI beside it or under --mpi-prefix"]
    options.show(bars_of.bars_table(found), remarks, "bars", markdown)
    options.write_json(json, bars_of.to_json(found))


@app.command("nodes")
def nodes(
    layouts: Annotated[str, typer.Option(help="nodes x ranks of each")] = DEFAULT_LAYOUTS,
    gbit: Annotated[str, typer.Option(help="speeds of the links, in Gbit/s")] = "1,2",
    size: Annotated[str, typer.Option(help="bytes per rank; K, M, G are binary")] = "25M",
    peers: Annotated[str, typer.Option(help=", ".join(PEERS))] = DEFAULT_NODE_PEERS,
    repeats: Repeats = 5,
    round_s: RoundS = 0.2,
    mpi_prefix: Prefixes = [],  # noqa: B006  read only
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """all_reduce across nodes of a laboratory (needs root), against the limit of the wire."""
    shapes = [options.parsed(nodes_of.Layout.parse, text) for text in parse_list(layouts)]
    speeds = [options.parsed(float, text) for text in parse_list(gbit)]
    nbytes = options.parsed(parse_size, size)
    chosen = options.parsed(lambda names: select(parse_list(names)), peers)
    effort = runner.Plan(rounds=repeats, round_s=round_s)
    _enter_sandbox()
    mpis, rows = mpi.discover(mpi_prefix), []
    with Console(stderr=True).status("starting") as status:
        for shape in shapes:
            for speed in speeds:
                rows.append(nodes_of.run(shape, speed, nbytes, chosen, mpis, effort, status.update))
    options.show(
        nodes_of.nodes_table(rows, nbytes, repeats), nodes_of.notes(rows), "nodes", markdown
    )
    options.write_json(json, nodes_of.to_json(rows))


@app.command("scaling")
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
    """Training under DDP across nodes of a laboratory (needs root): gloo, smddp, smddp over MPI."""
    chosen = [options.parsed(scaling_plan.known_model, name) for name in parse_list(models)]
    shapes = [options.parsed(nodes_of.Layout.parse, text) for text in parse_list(layouts)]
    plans = [
        scaling_plan.ScalingPlan(model, scaling_plan.MODELS[model], shape, gbit, repeats, steps)
        for model in chosen
        for shape in shapes
    ]
    _enter_sandbox()
    found = next(iter(mpi.discover(mpi_prefix)), None)
    with Console(stderr=True).status("starting") as status:
        rows = _or_exit(lambda: [scaling_of.run(plan, found, status.update) for plan in plans])
    shown = scaling_table.scaling_table(rows, repeats)
    options.show(shown, scaling_table.notes(rows), "scaling", markdown)
    options.write_json(json, scaling_table.to_json(rows))


app.command("predict")(predict)


@app.command("cluster", context_settings={"allow_interspersed_args": False})
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
    _enter_sandbox()
    found = _one_mpi(mpi_prefix) if launcher == "mpirun" else None
    with Network(nodes, gbit) as network:
        status = program.run(network, ranks_per_node, line, found)
    raise typer.Exit(status if status >= 0 else 128 - status)


def _one_mpi(prefixes: Prefixes) -> mpi.MpiInstall:
    found = mpi.discover(prefixes)
    if not found:
        what = "mpirun needs mpi4py where this runs, and an MPI there or under --mpi-prefix"
        typer.echo(f"error: {what}. Hint: pip install mpi4py mpich", err=True)
        raise typer.Exit(1)
    return found[0]


def _enter_sandbox() -> None:
    try:
        sandbox.enter()
    except OSError as error:
        typer.echo(f"error: there can be no nodes on this machine: {error}", err=True)
        raise typer.Exit(1) from None


def _report(
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
        markdown: See `options.show`.
        json: See `options.write_json`.
    """
    with Console(stderr=True).status("starting") as status:
        report = _or_exit(lambda: run(status.update))
    options.show(table_of(report), [], section, markdown)
    options.write_json(json, report.to_json())


def _or_exit(measure: Callable[[], T]) -> T:
    """End with the failed rank's words instead of a traceback of ours."""
    try:
        return measure()
    except RankError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def _judge(report: Report, *, asked: bool) -> None:
    """Fail when a peer that was asked for is missing, or when nothing was measured."""
    if not report.measurements or (asked and report.skipped):
        raise typer.Exit(1)


def _known_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; there are {', '.join(DTYPES)}")
    return name
