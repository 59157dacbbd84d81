"""The command line: `sdp run -n 4 [options] script.py [arguments of the script]`."""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sdp_plugins import __version__
from sdp_plugins.launch.crew import Crew
from sdp_plugins.launch.hosts.failure import LaunchError
from sdp_plugins.launch.hosts.request import Where, requested
from sdp_plugins.launch.local_ranks import LocalRanks
from sdp_plugins.launch.spawn import JobSpec, Kind, python_line
from sdp_plugins.launch.supervise import run_job

app = typer.Typer(
    name="sdp",
    help="Data-parallel jobs.",
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
    """Data-parallel jobs."""


# Options end at the script, as for `python`: what follows is the script's and stays untouched.
@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT", help="A Python script and its arguments."),
    ],
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--ranks",
            min=1,
            help="How many ranks to start; with hosts, if fewer than these have slots.",
        ),
    ] = None,
    hosts: Annotated[
        str,
        typer.Option(
            "--hosts",
            metavar="a:4,b:4",
            help="Start them by mpirun on these hosts, filled in this order, with so many slots. A "
            "host without a number has one; if none has, -n ranks are spread evenly.",
        ),
    ] = "",
    hostfile: Annotated[
        Path | None,
        typer.Option(
            "--hostfile", metavar="FILE", help="The same, a line each: `a slots=4`, `a:4` or `a`."
        ),
    ] = None,
    mpirun: Annotated[
        str | None,
        typer.Option(
            "--mpirun",
            metavar="PATH",
            help="Of Open MPI, MPICH or Intel MPI; if not given, the one in PATH or beside Python.",
        ),
    ] = None,
    master_port: Annotated[
        int,
        typer.Option(
            "--master-port",
            min=0,
            max=65535,
            help="MASTER_PORT of a job on hosts; 0: one that is free on the first.",
        ),
    ] = 0,
    exported: Annotated[
        list[str] | None,
        typer.Option(
            "-x",
            metavar="NAME[=VALUE]",
            help="A variable for ranks on other hosts, besides those of Python, threads, MPI and "
            "frameworks.",
        ),
    ] = None,
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
    status: Annotated[
        bool,
        typer.Option("--status/--no-status", help="Show on a terminal what each rank does."),
    ] = True,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FOLDER",
            help="Leave a timeline of all ranks there, for Perfetto; on hosts a folder of all.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            help="OMP_NUM_THREADS of each rank; if neither is given, its share of the cores (on "
            "hosts: as it is there).",
        ),
    ] = None,
) -> None:
    """Start processes of a Python script, on this machine or on hosts, and wait for them.

    They find torchrun's variables in their environment. The first rank that fails ends the others;
    its traceback is printed last and its exit code returned.
    """
    check(command, module, wanted=bool(ranks or hosts or hostfile))
    if not (hosts or hostfile):
        check_local(exported, mpirun)
    kind: Kind = "module" if module else "script"
    traced = folder_of_traces(trace) if trace else {}
    job_id = uuid.uuid4().hex
    crew: Crew
    if hosts or hostfile:
        where = Where(hosts, hostfile, ranks, mpirun)
        named = [*(exported or []), *(f"{name}={value}" for name, value in traced.items())]
        line = python_line(command, kind)
        try:
            crew = requested(
                where,
                line,
                threads=threads,
                master_port=master_port,
                exported=named,
                job_id=job_id,
            )
        except LaunchError as error:
            typer.echo(f"sdp run: {error}", err=True)
            raise typer.Exit(1) from None
    else:
        assert ranks
        crew = LocalRanks(JobSpec(command, kind, ranks, threads, more=traced, job_id=job_id))
    code = run_job(crew, timeout_s=timeout_s, prefix=prefix, status=status)
    if trace:
        typer.echo(f"sdp run: {merged_traces(trace, job_id)}", err=True)
    raise typer.Exit(code)


# Traces are the one thing here that needs a part of the core: other jobs start without it.


def folder_of_traces(folder: Path) -> dict[str, str]:
    """Make the folder; the variable that tells the ranks of it."""
    from sdp_plugins.launch.trace_files import prepared

    try:
        return prepared(folder)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def merged_traces(folder: Path, job_id: str) -> str:
    """Merge what the ranks have left, and say what came of it."""
    try:
        from sdp_plugins.launch.merge_trace import described

        return described(folder, job_id)
    except KeyboardInterrupt:  # the job has ended: what it came to stands
        return (
            "interrupted; the ranks' traces are left as they are. Hint: python -m "
            f"sdp_plugins.launch.merge_trace {folder}"
        )


def check(command: Sequence[str], module: bool, wanted: bool) -> None:
    """Say what is wrong with a command line.

    Args:
        command: What stands behind the options.
        module: Whether that is a module.
        wanted: Whether ranks are asked for.

    Raises:
        typer.BadParameter: It cannot be run.
    """
    if not wanted:
        behind = {"-n", "--ranks", "--hosts", "--hostfile", "-np"} & {*command[1:]}
        where = f" before {command[0]}, not behind it" if behind else ""
        text = f"-n says how many ranks to start{where}; --hosts a:4,b:4 does, too"
        raise typer.BadParameter(text)
    if not module and not Path(command[0]).exists():
        python = "leave out `python`" if command[0].startswith("python") else "a module needs -m"
        raise typer.BadParameter(f"there is no script {command[0]!r} ({python})")


def check_local(exported: Sequence[str] | None, mpirun: str | None) -> None:
    """See that nothing is asked for that only jobs on hosts have.

    Raises:
        typer.BadParameter: It is.
    """
    if exported:
        raise typer.BadParameter("-x is for ranks on other hosts; here: NAME=VALUE sdp run -n ...")
    if mpirun is not None:
        raise typer.BadParameter("--mpirun is for ranks on hosts; it goes with --hosts")


def main() -> None:
    """Entry point of `sdp`."""
    app()
