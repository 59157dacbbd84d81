"""The process that mpirun starts for every rank: it starts the rank and connects it to `sdp run`.

It runs until `sdp run` dismisses it or is lost; then it ends the rank with all processes that the
rank has started. Its exit code is always 0, because mpirun would end the other ranks at once, which
is the task of `sdp run`. The rank inherits the descriptors by which it talks to mpirun.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from sdp_plugins.core.internode import mpi_library
from sdp_plugins.core.local_address import free_port
from sdp_plugins.core.rank_environment import rank_environment
from sdp_plugins.core.topology import Topology
from sdp_plugins.launch.binding import undo_one_core_binding
from sdp_plugins.launch.event_loop import signals_handled
from sdp_plugins.launch.hosts import messages
from sdp_plugins.launch.hosts.io_forwarder import IoForwarder, Start

CONNECT_S = 10.0
SINGLE = "mpirun has given this process no rank"


class Options(argparse.Namespace):
    """The command line.

    Attributes:
        launcher: The port and the addresses of the launcher.
        master_port: MASTER_PORT on rank 0's host; 0: a free port.
        job: Id of the job.
    """

    launcher: str
    master_port: int
    job: str


def parsed(given: Sequence[str]) -> Options:
    """Parse the command line that `sdp run` has made."""
    parser = argparse.ArgumentParser(prog="sdp run's agent", allow_abbrev=False)
    parser.add_argument("--launcher", required=True, metavar="PORT@ADDRESS,ADDRESS")
    parser.add_argument("--master-port", type=int, required=True)
    parser.add_argument("--job", required=True)
    return parser.parse_args(given, Options())


def give_up(text: str) -> NoReturn:
    """End before the launcher is reached; mpirun forwards the text."""
    raise SystemExit(f"sdp run: {text}")


def connected(launcher: str) -> socket.socket:
    """Connect to the launcher by the first address that works."""
    port, _, addresses = launcher.partition("@")
    reasons = []
    for address in addresses.split(","):
        try:
            link = socket.create_connection((address, int(port)), CONNECT_S)
        except OSError as error:
            reasons.append(f"{address}: {error.strerror or error}")
        else:
            link.settimeout(None)
            messages.keep_alive(link)
            return link
    give_up(
        f"{socket.gethostname()} cannot reach sdp run on port {port} ({'; '.join(reasons)}). "
        "Hint: firewalls must allow TCP between the hosts."
    )


def variables(
    job: str, topology: Topology, start: Start, given: Mapping[str, str]
) -> dict[str, str]:
    """The rank's environment.

    By TORCHELASTIC_RUN_ID, torch and Lightning recognize the job. But it also means that the ranks
    do not use MPI, so it is set only if they cannot.
    """
    ours = {
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": str(start.master_port),
        "NODE_RANK": str(start.node),
        "GROUP_RANK": str(start.node),
        "GROUP_WORLD_SIZE": str(start.nodes),
        "SDP_JOB_ID": job,
    }
    if not mpi_library.installed():
        ours |= {"TORCHELASTIC_RUN_ID": job, "TORCHELASTIC_RESTART_COUNT": "0"}
        ours["TORCHELASTIC_MAX_RESTARTS"] = "0"
    return rank_environment(topology, {**given, **ours})


def run(options: Options, token: str) -> int:
    """Be the agent of one rank."""
    topology = Topology.from_env()
    if topology.source == "single":
        give_up(f"{SINGLE}. Hint: choose the mpirun of another MPI with --mpirun.")
    if not token:
        give_up(f"mpirun has not forwarded {messages.TOKEN}. Hint: choose another with --mpirun.")
    if topology.source == "openmpi":
        undo_one_core_binding(os.environ)
    forwarder = IoForwarder(connected(options.launcher))
    hello = {"token": token, "rank": topology.rank, "host": socket.gethostname()}
    try:
        first = topology.rank == 0
        hello["master_port"] = free_port("", options.master_port) if first else 0
    except OSError as error:
        hello["refused"] = (
            f"MASTER_PORT {options.master_port} on {socket.gethostname()}: {error.strerror}. "
            "Hint: choose another --master-port, or leave it out to get a free port."
        )
    with signals_handled(forwarder.on_signal, forwarder.loop):
        try:
            start = forwarder.ask(hello)
            environment = variables(options.job, topology, start, os.environ)
            forwarder.start(start.command, environment)
            forwarder.serve()
        except (OSError, subprocess.SubprocessError) as error:
            forwarder.refuse(f"{socket.gethostname()} cannot start its rank: {error}")
        finally:
            forwarder.close()
    return 0


def main() -> None:
    """Entry point."""
    for number in (signal.SIGINT, signal.SIGHUP):  # `sdp run` forwards them
        signal.signal(number, lambda number, frame: None)  # not SIG_IGN, which ranks inherit
    token = os.environ.pop(messages.TOKEN, "")
    sys.exit(run(parsed(sys.argv[1:]), token))
