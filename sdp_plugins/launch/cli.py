"""The command line: `sdp run -n 4 [options] script.py [arguments of the script]`."""

import difflib
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sdp_plugins import __version__
from sdp_plugins.launch.hosts import LaunchError
from sdp_plugins.launch.hosts.host_job import HostJob, planned
from sdp_plugins.launch.hosts.remote_ranks import RemoteRanks
from sdp_plugins.launch.local_ranks import LocalRanks
from sdp_plugins.launch.rank_count import default_rank_count
from sdp_plugins.launch.spawn import python_line
from sdp_plugins.launch.supervise import Options, Supervisor

if TYPE_CHECKING:
    from sdp_plugins.launch.elastic import Limits

app = typer.Typer(
    name="sdp",
    help="Start data-parallel jobs, and see what they do.",
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
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Start data-parallel jobs, and see what they do."""


# Options end at the script, as for `python`: what follows is the script's and stays untouched.
# `check_script` refuses unknown options before it, which may be meant for the script.
@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    context: typer.Context,
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
            help="Number of ranks. Default: one per GPU, or without GPUs one per core, at most 8. "
            "With hosts: at most, and by default, their number of slots.",
        ),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option("--nproc-per-node", "--nproc_per_node", min=1, help="torchrun's name for -n."),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="a:4,b:4",
            help="Start the ranks on these hosts, filled in this order, by mpirun, or with "
            "--elastic by ssh. The numbers are "
            "slots. A host without a number has one slot; if no host has a number, -n ranks are "
            "spread evenly.",
        ),
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(
            "--hostfile",
            metavar="FILE",
            help="A file with one host per line: `a slots=4`, `a:4` or `a`.",
        ),
    ] = None,
    mpirun: Annotated[
        str | None,
        typer.Option(
            "--mpirun",
            metavar="PATH",
            help="mpirun of Open MPI, MPICH or Intel MPI. Default: the one in PATH or beside "
            "Python.",
        ),
    ] = None,
    master_port: Annotated[
        int,
        typer.Option(
            "--master-port",
            min=0,
            max=65535,
            help="MASTER_PORT of a job with hosts; 0: a free port of the first host.",
        ),
    ] = 0,
    exported: Annotated[
        list[str] | None,
        typer.Option(
            "-x",
            metavar="NAME[=VALUE]",
            help="Pass this variable to ranks on other hosts. Variables of Python, thread pools, "
            "MPI and frameworks are always passed.",
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for `python -m`.")
    ] = False,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0.0,
            metavar="SECONDS",
            help="Show what the ranks wait for and end the job if it takes longer than this.",
        ),
    ] = None,
    prefix: Annotated[
        bool, typer.Option("--prefix/--no-prefix", help="Begin every line of output with its rank.")
    ] = True,
    status: Annotated[
        bool,
        typer.Option("--status/--no-status", help="On a terminal, show what each rank does."),
    ] = True,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FOLDER",
            help="Write a timeline of all ranks to this folder, for Perfetto. With hosts: a folder "
            "that all hosts share.",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            min=0,
            max=65535,
            metavar="PORT",
            help="Serve metrics of the ranks for Prometheus at this port of 127.0.0.1. Needs "
            "prometheus-client. For ranks on hosts: sdp top --metrics-port on each host.",
        ),
    ] = None,
    metrics_address: Annotated[
        str,
        typer.Option(
            "--metrics-address",
            metavar="ADDRESS",
            help="Serve the metrics at this address instead; anyone who reaches it can read them.",
        ),
    ] = "127.0.0.1",
    elastic: Annotated[
        str | None,
        typer.Option(
            "--elastic",
            metavar="MIN:MAX",
            help="Start MAX ranks, go on when ranks are lost, and start others in their places; "
            "fail when fewer than MIN are left and none can be started. The script has to be "
            "written for it: see docs/elastic.md.",
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            min=0,
            help="With --elastic: how many processes are started in the places of lost ones.",
        ),
    ] = 10,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            min=1,
            help="OMP_NUM_THREADS of each rank. Default: the variable if it is set, else the "
            "rank's share of the cores (with hosts: no change).",
        ),
    ] = None,
) -> None:
    """Start a Python script as several ranks, on this machine or on hosts, and wait for them.

    The ranks find torchrun's variables in their environment. If a rank fails, the others are ended;
    the traceback of the rank that failed first is printed last, and its exit code is returned. On
    SIGUSR1, the command shows what the ranks wait for, and their Python stacks. In the background
    of a shell script a job ignores SIGINT, as every program does there: end it with SIGTERM.
    """
    check_script(command, module, context)
    on_hosts = hosts is not None or hostfile is not None  # empty ones are refused
    if on_hosts:
        if metrics_port is not None:
            raise typer.BadParameter(
                "--metrics-port is for ranks on this machine. Hint: sdp top --metrics-port PORT on "
                "each host"
            )
        if elastic is not None and mpirun is not None:
            raise typer.BadParameter(
                "mpirun ends a job that loses a rank, so --elastic starts ranks by ssh. "
                "Hint: leave out --mpirun"
            )
        if ranks_per_node is not None:
            raise typer.BadParameter("--nproc-per-node is for this machine. Hint: --hosts a:4,b:4")
    else:
        check_local(exported, mpirun, master_port)
        ranks = ranks or ranks_per_node
        if elastic is None:
            ranks = ranks or announced_default(command)
    limits = None
    if elastic is not None:
        from sdp_plugins.launch.elastic import Limits

        if ranks is not None:
            raise typer.BadParameter("--elastic MIN:MAX starts MAX ranks. Hint: leave out -n")
        limits = Limits.parse(elastic, restarts)
        ranks = limits.most
    line = python_line(command, module)
    traced = folder_of_traces(trace) if trace else {}
    job_id = uuid.uuid4().hex
    options: Options = {"timeout_s": timeout_s, "prefix": prefix, "status": status}
    if on_hosts:
        named = [*(exported or []), *(f"{name}={value}" for name, value in traced.items())]
        job = HostJob(
            *(line, hosts or "", hostfile, ranks, mpirun, threads, master_port, named, job_id),
            elastic=limits is not None,
        )
        supervisor = supervisor_on_hosts(job, limits, options)
    else:
        assert ranks
        environment = {**os.environ, **traced}
        if limits is None:
            workers = LocalRanks(line, ranks, environment, threads=threads, job_id=job_id)
            supervisor = Supervisor(workers, **options)
        else:
            from sdp_plugins.launch.elastic import local_supervisor

            supervisor = local_supervisor(line, limits, environment, threads, job_id, options)
    with ExitStack() as servers:
        if metrics_port is not None:
            from sdp_plugins.launch.rank_metrics import serve_metrics

            serve_metrics(servers, metrics_address, metrics_port)
        code = supervisor.run()
    if trace:
        typer.echo(f"sdp run: {merged_traces(trace, job_id)}", err=True)
    raise typer.Exit(code)


# Imported in functions: only elastic jobs and those with --trace need these modules.


def supervisor_on_hosts(job: HostJob, limits: "Limits | None", options: Options) -> Supervisor:
    """Check that a job on hosts can be started, or leave with the reason."""
    try:
        plan = planned(job)
    except LaunchError as error:
        typer.echo(f"sdp run: {error}", err=True)
        raise typer.Exit(1) from None
    if limits is None:
        return Supervisor(RemoteRanks(plan), **options)
    from sdp_plugins.launch.elastic import ElasticSupervisor
    from sdp_plugins.launch.hosts.elastic_hosts import ElasticHosts

    return ElasticSupervisor(ElasticHosts(plan), limits, options)


def folder_of_traces(folder: Path) -> dict[str, str]:
    """Make the folder; returns the variable that tells the ranks to write there."""
    from sdp_plugins.trace.folder import prepared

    try:
        return prepared(folder)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def merged_traces(folder: Path, job_id: str) -> str:
    """Merge the ranks' traces; returns the result as text."""
    try:
        from sdp_plugins.trace.folder import MERGED
        from sdp_plugins.trace.merge import merge

        return f"{folder / MERGED}: open it in https://ui.perfetto.dev\n{merge(folder, job_id)}"
    except (OSError, ValueError) as error:
        return f"there is no trace: {error}"
    except KeyboardInterrupt:  # the job has ended, and its exit code stands
        return (
            "interrupted; the ranks' traces are not merged. Hint: python -m "
            f"sdp_plugins.trace merge {folder}"
        )


def announced_default(command: Sequence[str]) -> int:
    """Choose the number of ranks, and print it."""
    ranks = default_rank_count()
    behind = {"-n", "--ranks", "-np", "--nproc-per-node"} & {*command[1:]}
    where = f", before {command[0]}, not after it" if behind else ""
    text = f"sdp run: starting {ranks} ranks on this machine (set the number with -n{where})"
    typer.echo(text, err=True)
    return ranks


def check_script(command: Sequence[str], module: bool, context: typer.Context) -> None:
    """Check that the script or module exists, and that no unknown option precedes it.

    Raises:
        typer.BadParameter: There is no such script.
    """
    if command[0].startswith("-"):
        known = [name for parameter in context.command.params for name in parameter.opts]
        meant = difflib.get_close_matches(command[0].split("=")[0], known, 1, cutoff=0.75)
        hint = f"did you mean {meant[0]}?" if meant else "options of the script go after it."
        raise typer.BadParameter(f"sdp run has no option {command[0]}. Hint: {hint}")
    if not module and not Path(command[0]).exists():
        python = "leave out `python`" if command[0].startswith("python") else "a module needs -m"
        raise typer.BadParameter(f"there is no script {command[0]!r} ({python})")


def check_local(exported: Sequence[str] | None, mpirun: str | None, master_port: int) -> None:
    """Refuse options that apply to jobs with hosts only.

    Raises:
        typer.BadParameter: One was given.
    """
    if exported:
        raise typer.BadParameter("-x is for ranks on other hosts. Hint: NAME=VALUE sdp run -n ...")
    if mpirun is not None:
        raise typer.BadParameter("--mpirun is for ranks on hosts. Hint: add --hosts or --hostfile")
    if master_port:
        raise typer.BadParameter(
            "--master-port is for ranks on hosts. Hint: here, sdp run chooses a free port"
        )


PROGRAMS = {
    "trace": ("sdp_plugins.trace.merge", "Merge the ranks' traces into one timeline."),
    "flight": ("sdp_plugins.flight", "Show which ranks of a job wait for which others."),
    "top": ("sdp_plugins.top", "Show what the ranks of a running job do, live."),
    "doctor": ("sdp_plugins.doctor", "Say whether smddp is in use here, and what slows it down."),
}
"""Subcommands that run other modules: the module, also for `python -m`, and its help text."""


def forwarding(module: str) -> Callable[[typer.Context], None]:
    """Make a subcommand that becomes `python -m module` with the same arguments."""

    def forward(context: typer.Context) -> None:
        os.execv(sys.executable, [sys.executable, "-m", module, *context.args])

    return forward


for name, (module_name, text) in PROGRAMS.items():
    app.command(
        name,
        help=text,
        add_help_option=False,  # --help is the program's
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )(forwarding(module_name))


def main() -> None:
    """Entry point of `sdp`."""
    app()
