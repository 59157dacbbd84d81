"""The command line: `sdp run -n 4 [options] script.py [arguments of the script]`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from sdp_plugins import __version__
from sdp_plugins.launch.local_ranks import LocalRanks
from sdp_plugins.launch.spawn import JobSpec
from sdp_plugins.launch.supervise import run_job

app = typer.Typer(
    name="sdp",
    help="Data-parallel jobs on this machine.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def print_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def sdp(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Data-parallel jobs on this machine."""


# Options end at the script, as for `python`: what follows is the script's and stays untouched.
@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT", help="A Python script and its arguments."),
    ],
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="How many ranks to start.")],
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for `python -m`.")
    ] = False,
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", min=0.0, metavar="SECONDS", help="End a job that takes longer."),
    ] = None,
    prefix: Annotated[
        bool, typer.Option("--prefix/--no-prefix", help="Start every output line with its rank.")
    ] = True,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            help="OMP_NUM_THREADS of each rank; if neither is given, its share of the cores.",
        ),
    ] = None,
) -> None:
    """Start RANKS processes of a Python script on this machine and wait for them.

    They find torchrun's variables in their environment. The first rank that fails ends the others;
    its traceback is printed last and its exit code returned.
    """
    if not module and not Path(command[0]).exists():
        raise typer.BadParameter(f"there is no script {command[0]!r} (a module is started with -m)")
    kind: Literal["script", "module"] = "module" if module else "script"
    job = JobSpec(command=command, kind=kind, world_size=ranks, threads=threads)
    raise typer.Exit(run_job(LocalRanks(job), timeout_s=timeout_s, prefix=prefix))


def main() -> None:
    """Entry point of `sdp`."""
    app()
