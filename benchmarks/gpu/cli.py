"""The command `gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gpu import own_gpu, training_parts
from benchmarks.gpu import plan as plans
from benchmarks.gpu.bench import Bench
from benchmarks.options import Ranks, progress
from benchmarks.units import parse_list

SHOWN = 800  # characters of an error that the terminal shows; the files have all
PARTS = (*training_parts.PARTS, *own_gpu.PARTS)
NAMES = ",".join(part.name for part in PARTS)


def gpu(
    device: Annotated[str, typer.Option(help="cuda, cpu, or another type of torch's")] = "cuda",
    out: Annotated[
        Path, typer.Option(file_okay=False, help="folder for gpu.md, gpu.json and a profile")
    ] = Path("bench-results"),
    parts: Annotated[str, typer.Option(help="some of " + NAMES)] = NAMES,
    budget: Annotated[float, typer.Option(min=1, help="seconds; what remains is skipped")] = 420,
    ranks: Ranks = 2,
    repeats: Annotated[int, typer.Option(min=0, help="turns of each variant; 0: default")] = 0,
    engine_threads: Annotated[
        int, typer.Option(min=0, help="SDP_ENGINE_THREADS of a rank; 0: from the cores")
    ] = 0,
    modules: Annotated[str, typer.Option(help="modules, or module:function, that ranks load")] = "",
    smoke: Annotated[bool, typer.Option(help="tiny sizes: does every part run?")] = False,
) -> None:
    """Check and measure device tensors: smddp, both of its ways, and gloo, on one GPU or more."""
    names = parse_list(parts)
    if unknown := set(names) - {part.name for part in PARTS}:
        raise typer.BadParameter(f"there is no part {', '.join(sorted(unknown))}")
    settings = {} if device == "cuda" else plans.of_processors()
    settings |= plans.smoke() if smoke else {}
    if repeats:
        settings["rounds"] = repeats
    plan = plans.GpuPlan(
        device=device,
        modules=tuple(parse_list(modules)),
        ranks=ranks,
        budget_s=budget,
        engine_threads=engine_threads,
        **settings,
    )
    out.mkdir(parents=True, exist_ok=True)
    with progress() as tell, Bench(plan, out, tell) as run:
        run.run(
            [part for part in PARTS if part.name in names],
            lambda section: print(section.to_markdown(SHOWN), flush=True),
        )
    for name, fact in run.document.machine.items():
        typer.echo(f"- {name}: {fact}")
    if any(section.failed for section in run.document.sections):
        raise typer.Exit(1)
