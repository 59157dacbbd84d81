"""SMDDP's launch commands: `smddprun`, `smddpsinglenode` and `smddpmprun`.

In a rank that mpirun (or another launcher) has started, they set the variables that SMDDP's scripts
read, and become the command: same process, same streams, same arguments. Started by hand, they
start the ranks themselves, as `sdp run` does. SageMaker's toolkit puts `smddprun` before the script
of every job with a data-parallel distribution, even if the job does not use this package, so it
overrides no variable and changes nothing else. It runs once per rank, so it imports few modules.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from sdp_plugins.core.rank_environment import misplaced, rank_environment
from sdp_plugins.core.topology import Topology
from sdp_plugins.launch.binding import undo_one_core_binding

NOT_FOUND, NOT_STARTED, USAGE = 127, 126, 2  # the exit codes of shells


class Options(NamedTuple):
    """The parsed command line.

    Attributes:
        command: The program to become or to start, and its arguments.
        ranks: How many to start by hand; None: as many as suit the machine.
        exported: NAME=VALUE, or NAME, which is exported anyway.
    """

    command: Sequence[str]
    ranks: int | None = None
    exported: Sequence[str] = ()


def parsed(name: str, given: Sequence[str]) -> Options:
    """Parse the command line; options end at the command."""
    if given and not given[0].startswith("-"):  # the usual case in SageMaker's ranks
        return Options(given)
    import argparse

    parser = argparse.ArgumentParser(
        prog=name,
        allow_abbrev=False,
        description="In a rank that mpirun started: set RANK, WORLD_SIZE, SMDATAPARALLEL_* and "
        "become COMMAND. Without a launcher: start the ranks on this machine.",
    )
    parser.add_argument(
        "-n",
        dest="ranks",
        type=int,
        help="number of ranks to start on this machine; default: one per GPU, or without GPUs one "
        "per core, at most 8",
    )
    parser.add_argument(
        "-x", dest="exported", action="append", default=[], metavar="NAME[=VALUE]", help="set it"
    )
    if name == "smddpmprun":  # options of the model-parallel library, ignored here
        parser.add_argument("-i", dest="instance_type", help=argparse.SUPPRESS)
        parser.add_argument("--allow-bypass", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND ...")
    found = parser.parse_args(given)
    if found.command[:1] == ["--"]:
        del found.command[0]
    if not found.command:
        parser.error("COMMAND is missing")
    for text in found.exported:
        if text.startswith("="):
            parser.error(f"-x {text}: no name before the =")
        if "=" not in text and text not in os.environ:
            parser.error(f"-x {text}: it is not set. Hint: -x {text}=VALUE sets it")
    if found.ranks is not None and found.ranks < 1:
        parser.error(f"-n {found.ranks}: a job has at least one rank")
    return Options(found.command, found.ranks, found.exported)


def run(name: str, given: Sequence[str]) -> int:
    """Become the command, or start its ranks on this machine.

    A job of one rank may come from stale variables of another launcher, as in a shell of srun or a
    container that sets RANK. So `-n` starts more ranks there.

    Returns:
        The exit code of a job on this machine, or of a failure; otherwise it does not return.
    """
    options = parsed(name, given)
    environment = dict(os.environ)
    for text in options.exported:
        variable, equals, value = text.partition("=")
        if equals:
            environment[variable] = value
    try:
        topology = Topology.from_env(environment)
    except ValueError as error:
        return _say(name, str(error), USAGE)
    wanted = options.ranks or topology.world_size
    if topology.source == "single" or (wanted > 1 and topology.world_size == 1):
        return _start_here(name, options, environment)
    if wanted != topology.world_size:
        return _say(
            name,
            f"this is rank {topology.rank} of {topology.world_size} ({topology.source}), but -n "
            f"asks for {wanted}. Hint: leave out -n if a launcher has started the ranks.",
            USAGE,
        )
    if topology.source == "openmpi":
        undo_one_core_binding(environment)
        if topology.rank == 0 and (text := misplaced(topology, environment)):
            _say(name, text)
    return _become(name, options.command, rank_environment(topology, environment))


def _become(name: str, command: Sequence[str], environment: dict[str, str]) -> int:
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        text = f"cannot start {command[0]!r}: {error.strerror}"
        return _say(name, text, NOT_FOUND if missing else NOT_STARTED)


def _start_here(name: str, options: Options, environment: dict[str, str]) -> int:
    import shutil

    from sdp_plugins.launch.local_ranks import LocalRanks
    from sdp_plugins.launch.rank_count import default_rank_count
    from sdp_plugins.launch.spawn import own_program
    from sdp_plugins.launch.supervise import Supervisor

    if shutil.which(options.command[0]) is None:
        hint = f" (python {options.command[0]} ...)" if options.command[0].endswith(".py") else ""
        return _say(name, f"there is no program {options.command[0]!r}{hint}", NOT_FOUND)
    ranks = options.ranks or default_rank_count()
    if options.ranks is None:
        _say(name, f"starting {ranks} ranks on this machine (set the number with -n)")
    environment.setdefault("PYTHONUNBUFFERED", "1")  # Python buffers output to a pipe
    in_a_rank = [*own_program(f"{__spec__.name}:smddprun"), *options.command]
    return Supervisor(LocalRanks(in_a_rank, ranks, environment), program=name).run()


def _say(name: str, text: str, code: int = 0) -> int:
    print(f"{name}: {text}", file=sys.stderr)
    return code


def smddprun() -> None:
    """Entry point of `smddprun`."""
    raise SystemExit(run("smddprun", sys.argv[1:]))


def smddpsinglenode() -> None:
    """Entry point of `smddpsinglenode`."""
    raise SystemExit(run("smddpsinglenode", sys.argv[1:]))


def smddpmprun() -> None:
    """Entry point of `smddpmprun`."""
    raise SystemExit(run("smddpmprun", sys.argv[1:]))


if __name__ == "__main__":
    smddprun()
