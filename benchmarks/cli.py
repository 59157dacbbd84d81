"""The command line of the benchmarks."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from benchmarks import collectives as collectives_of
from benchmarks import ddp as training
from benchmarks import fsdp as fsdp_of
from benchmarks import fusion as fusion_of
from benchmarks import keras as keras_of
from benchmarks import machine, mpi, nodes_cli, options, runner, table
from benchmarks import memory as memory_of
from benchmarks import step as step_of
from benchmarks import targets as targets_of
from benchmarks.all_reduce import all_reduce_table
from benchmarks.gpu.cli import gpu
from benchmarks.libraries import select
from benchmarks.options import (
    Json,
    Libraries,
    Markdown,
    Plot,
    Prefixes,
    Ranks,
    Repeats,
    RoundS,
    Steps,
    Threads,
)
from benchmarks.predict.cli import predict
from benchmarks.recovery.cli import recovery
from benchmarks.results import Report
from benchmarks.slow.cli import slow
from benchmarks.testbed import start
from benchmarks.testbed.network import Network
from benchmarks.units import parse_list, parse_size
from benchmarks.values import DTYPES

RENAMED = {"bars": "targets"}


class Commands(TyperGroup):
    """The commands, also under their former names for one release."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name."""
        if name := RENAMED.get(cmd_name):
            typer.echo(f"warning: {cmd_name} is now called {name}", err=True)
        return super().get_command(ctx, name or cmd_name)


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False)
DEFAULT_SIZES = "4K,64K,1M,25M,100M"
DEFAULT_LIBRARIES = "gloo,smddp,core,mpi,lower_bound,memcpy"

Backends = Annotated[str, typer.Option(help="backends of torch.distributed")]
Rows = Annotated[int, typer.Option(min=1, help="sequences per rank and step")]
Tokens = Annotated[int, typer.Option(min=1, max=512, help="length of a sequence")]
BucketView = Annotated[bool, typer.Option(help="DDP's gradient_as_bucket_view")]
Layers = Annotated[int, typer.Option(min=1, help="layers of the model; 8 make BERT-Medium")]


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
    libraries: Libraries = DEFAULT_LIBRARIES,
    registered: Annotated[
        bool,
        typer.Option(
            "--registered/--unregistered",
            help="smddp and core in memory that peers can map, or in private memory",
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
    chosen = options.parsed(
        lambda names: select(parse_list(names), registered=registered), libraries
    )
    with options.progress() as tell:
        report = runner.run(plan, chosen, mpi.discover(mpi_prefix), tell)
    options.show(all_reduce_table(report), table.notes(report), "all_reduce", markdown)
    options.write_json(json, report.to_json())
    if plot:
        from benchmarks.plot import draw  # matplotlib takes a second to import

        draw(report, plot)
    _judge(report, asked=libraries != DEFAULT_LIBRARIES)


def _training_plan(
    ranks: int,
    threads: int,
    repeats: int,
    steps: int,
    rows: int,
    tokens: int,
    layers: int,
    optimizer: str,
    **more: Any,
) -> training.DdpPlan:
    """Return the plan of the options that `ddp`, `fsdp` and `step` share."""
    model = {**training.FULL_MODEL, "layers": layers}
    return training.DdpPlan(
        ranks=ranks,
        threads=threads,
        rounds=repeats,
        steps=steps,
        rows=rows,
        tokens=tokens,
        optimizer=optimizer,
        model=model,
        **more,
    )


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
    """Training step of a BERT of 41 M parameters under DDP, by backend and without one."""
    shape = (ranks, threads, repeats, steps, rows, tokens, layers, optimizer)
    plan = _training_plan(*shape, backends=tuple(parse_list(backends)), bucket_view=bucket_view)
    options.report(partial(training.run, plan), training.ddp_table, "ddp", markdown, json)


@app.command("collectives")
def collectives(
    operations: Annotated[
        str, typer.Option(help="some of " + ", ".join(collectives_of.OPERATIONS))
    ] = ",".join(collectives_of.OPERATIONS),
    sizes: Annotated[str, typer.Option(help="bytes per rank")] = "4K,1M,25M",
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
    options.report(
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
    plan = _training_plan(ranks, threads, repeats, steps, rows, tokens, layers, optimizer)
    options.report(partial(fsdp_of.run, plan), fsdp_of.fsdp_table, "fsdp", markdown, json)


@app.command("step")
def step(
    variants: Annotated[
        str, typer.Option(help="some of " + ", ".join(step_of.VARIANTS))
    ] = ",".join(step_of.VARIANTS),
    ranks: Ranks = 2,
    threads: Threads = 1,
    repeats: Repeats = 7,
    steps: Steps = 3,
    rows: Rows = 1,
    tokens: Tokens = 64,
    layers: Layers = 8,
    optimizer: Annotated[str, typer.Option(help=", ".join(step_of.OPTIMIZERS))] = "fused_adamw",
    nodes: Annotated[
        int, typer.Option(min=1, help="nodes of a testbed that share the ranks (needs root)")
    ] = 1,
    gbit: Annotated[float, typer.Option(min=0.001, help="speed of the nodes' links")] = 1.0,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Training step of the same BERT by DDP, ZeRO, FSDP2 and shards, and on each rank alone."""
    names = tuple(parse_list(variants))
    if unknown := set(names) - set(step_of.VARIANTS):
        raise typer.BadParameter(f"there is no variant {', '.join(sorted(unknown))}")
    if step_of.REFERENCE not in names:
        names = (step_of.REFERENCE, *names)
    if optimizer not in step_of.OPTIMIZERS:
        raise typer.BadParameter(f"unknown optimizer {optimizer!r}")
    shape = (ranks, threads, repeats, steps, rows, tokens, layers, optimizer)
    plan = _training_plan(*shape, backends=names)
    section = f"step {optimizer}"
    if nodes == 1:
        options.report(partial(step_of.run, plan), step_of.step_table, section, markdown, json)
        return
    if ranks % nodes:
        raise typer.BadParameter(f"{ranks} ranks cannot be divided among {nodes} nodes")
    nodes_cli.enter_sandbox()
    with Network(nodes, gbit) as network:
        run = partial(step_of.run, plan, network=network)
        section += f" {nodes} nodes"
        options.report(run, step_of.step_table, section, markdown, json)


@app.command("memory")
def memory(
    backends: Backends = "gloo,smddp",
    ranks: Ranks = 2,
    layers: Layers = 8,
    bucket_view: BucketView = False,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Memory per rank of that training, by backend."""
    plan = training.DdpPlan(
        backends=tuple(parse_list(backends)),
        ranks=ranks,
        bucket_view=bucket_view,
        model={**training.FULL_MODEL, "layers": layers},
    )
    options.report(partial(memory_of.run, plan), memory_of.memory_table, "memory", markdown, json)


@app.command("fusion")
def fusion(
    ranks: Ranks = 2,
    layers: Layers = 8,
    threshold: Annotated[str, typer.Option(help="size of a fusion buffer")] = "25M",
    repeats: Repeats = 7,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Average that model's gradients: in fusion buffers, one by one, as one flat buffer."""
    size = options.parsed(parse_size, threshold)
    plan = fusion_of.FusionPlan(layers, size, ranks, repeats)
    options.report(partial(fusion_of.run, plan), fusion_of.fusion_table, "fusion", markdown, json)


@app.command("keras")
def keras(
    backend: Annotated[str, typer.Option(help="tensorflow, torch or jax")] = "tensorflow",
    ranks: Ranks = 2,
    rows: Annotated[int, typer.Option(min=1, help="rows of the global batch")] = 16,
    layers: Annotated[int, typer.Option(min=1, help="number of hidden layers")] = 3,
    width: Annotated[int, typer.Option(min=1, help="width of the hidden layers")] = 4096,
    optimizer: Annotated[str, typer.Option(help="sgd, adam or another of Keras")] = "sgd",
    repeats: Repeats = 5,
    gbit: Annotated[
        float | None,
        typer.Option(min=0.001, help="each rank on a node of its own (needs root), over MPI"),
    ] = None,
    mpi_prefix: Prefixes = [],  # noqa: B006  read only
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Training step of Keras: smddp, without communication, and TensorFlow's strategy."""
    if backend not in keras_of.BACKENDS:
        raise typer.BadParameter(f"there is no backend {backend!r} of Keras", param_hint="backend")
    sizes = (ranks, rows, layers, width, repeats)
    plan = keras_of.KerasPlan(backend, *sizes, optimizer=optimizer, gbit=gbit)
    section = f"keras {backend}" + (f" {optimizer}" if optimizer != "sgd" else "")
    with ExitStack() as stack:
        run = partial(keras_of.run, plan)
        if gbit is not None:
            nodes_cli.enter_sandbox()
            section += " on nodes"
            network = stack.enter_context(Network(ranks, gbit))
            run = partial(run, mpi=nodes_cli.one_mpi(mpi_prefix), start=start.on(network))
        options.report(run, keras_of.keras_table, section, markdown, json)


@app.command("targets")
def targets(
    repeats: Repeats = 9,
    round_s: RoundS = 0.2,
    mpi_prefix: Prefixes = [],  # noqa: B006  read only
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """The performance targets of smddp, and whether they are reached. Takes minutes."""
    effort, mpis = runner.Plan(rounds=repeats, round_s=round_s), mpi.discover(mpi_prefix)
    with options.progress() as tell:
        found = targets_of.collect(mpis, effort, training.DdpPlan(rounds=repeats), tell)
    remarks = [] if mpis else ["MPI: needs mpi4py here and an MPI beside it or under --mpi-prefix"]
    options.show(targets_of.targets_table(found), remarks, "targets", markdown)
    options.write_json(json, targets_of.to_json(found))


app.command("gpu")(gpu)
app.command("nodes")(nodes_cli.nodes)
app.command("scaling")(nodes_cli.scaling)
app.command("slow")(slow)
app.command("predict")(predict)
app.command("recovery")(recovery)
app.command("cluster", context_settings={"allow_interspersed_args": False})(nodes_cli.cluster)


def _judge(report: Report, *, asked: bool) -> None:
    """Fail if a requested library is missing, or if nothing was measured."""
    if not report.measurements or (asked and report.skipped):
        raise typer.Exit(1)


def _known_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; there are {', '.join(DTYPES)}")
    return name


@app.command("figures")
def figures(folder: Annotated[Path, typer.Argument(exists=True, file_okay=False)]) -> None:
    """Draw the documentation's figures from its tables, as SVG: figures docs/images."""
    from benchmarks.figures import draw

    draw(folder)
