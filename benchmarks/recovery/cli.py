"""The command `recovery`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks import options, table
from benchmarks.options import Json, Markdown, Repeats
from benchmarks.recovery.launch import VARIANTS
from benchmarks.recovery.run import RecoveryPlan, recovery_table, run
from benchmarks.units import parse_list


def recovery(
    variants: Annotated[str, typer.Option(help="some of " + ", ".join(VARIANTS))] = ",".join(
        VARIANTS
    ),
    ranks: Annotated[int, typer.Option(min=2, help="processes per training")] = 4,
    repeats: Repeats = 4,
    kills: Annotated[int, typer.Option(min=1, help="ranks killed in each turn")] = 5,
    checkpoint_steps: Annotated[
        int, typer.Option(min=1, help="torchelastic saves a checkpoint after so many steps")
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="of the moments and the ranks")] = 1,
    torchft: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="virtual environment with torchft"),
    ] = None,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """From SIGKILL of a rank to the next step: smddp, torchelastic and torchft. Takes minutes."""
    names = tuple(parse_list(variants))
    if unknown := set(names) - set(VARIANTS):
        raise typer.BadParameter(f"there is no variant {', '.join(sorted(unknown))}")
    plan = RecoveryPlan(names, ranks, repeats, kills, checkpoint_steps, seed)
    with options.progress() as tell:
        report = options.or_exit(lambda: run(plan, torchft, tell))
    options.show(recovery_table(report), table.notes(report), "recovery", markdown)
    options.write_json(json, report.to_json())
    if report.skipped and variants != ",".join(VARIANTS):
        raise typer.Exit(1)
