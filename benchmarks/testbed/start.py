"""Command lines that start a program's ranks on the nodes of a testbed."""

from __future__ import annotations

import shlex
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.job import Command, Start
from benchmarks.mpi import MpiInstall
from benchmarks.testbed.network import INTERFACE, Network

PORT = 29500


def environment(network: Network) -> dict[str, str]:
    """Return the environment variables that describe the nodes' network to libraries."""
    return {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        # Otherwise MPI detects that all "nodes" share one machine's memory.
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": INTERFACE,
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": INTERFACE,
        "OMPI_MCA_btl_tcp_if_include": INTERFACE,
        # The nodes share this machine's cores: polling without a pause blocks other ranks.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PRTE_MCA_prte_if_include": INTERFACE,
    }


def by_torchrun(network: Network, ranks_per_node: int, line: Sequence[str]) -> list[list[str]]:
    """Return one torchrun command for each node."""
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    # torchrun starts Python itself.
    if line and Path(line[0]).name.startswith("python"):
        line = line[1:]
    return [
        network.command(
            node,
            [
                *torchrun,
                f"--nnodes={network.nodes}",
                f"--nproc-per-node={ranks_per_node}",
                f"--node-rank={node}",
                f"--master-addr={network.address(0)}",
                f"--master-port={PORT}",
                *line,
            ],
        )
        for node in range(network.nodes)
    ]


def by_mpirun(
    network: Network, mpi: MpiInstall, lines: Sequence[Sequence[str]], folder: str
) -> list[str]:
    """Return one mpiexec on the first node; `lines` has equally many ranks on each node."""
    per_node = len(lines) // network.nodes
    agent = remote_shell(network, folder)
    hosts = [f"{network.address(node)}:{per_node}" for node in range(network.nodes)]
    if mpi.flavour == "openmpi":
        options = ["--prtemca", "plm_ssh_agent", str(agent)]
        options += ["--map-by", ":oversubscribe", "--bind-to", "none"]
        options += [part for name in environment(network) for part in ("-x", name)]
        # mpiexec restarts its search for a host for each rank.
        places = [hosts[rank // per_node] for rank in range(len(lines))]
    else:
        options = ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", ",".join(hosts)]
        places = []
    return network.command(0, mpi.command(lines, options, places))


def remote_shell(network: Network, folder: str) -> Path:
    """Write the program that mpiexec runs instead of ssh."""
    path = Path(folder) / "agent"
    cases = "\n".join(
        f"  {network.address(node)}|{network.host(node)}) "
        f'exec {shlex.join(network.command(node, ["sh", "-c"]))} "$*" ;;'
        for node in range(network.nodes)
    )
    path.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        'host=$1; shift\ncase "$host" in\n'
        f"{cases}\n"
        '  *) echo "no node $host" >&2; exit 1 ;;\nesac\n'
    )
    path.chmod(0o755)
    return path


def on(network: Network) -> Start:
    """Return a function that starts a job's ranks on the nodes, equally many on each."""

    def start(lines: Sequence[list[str]], mpi: MpiInstall | None, folder: str) -> list[Command]:
        variables = environment(network)
        if mpi:
            return [(by_mpirun(network, mpi, lines, folder), {**variables, **mpi.environment()})]
        job = {**variables, "SDP_JOB_ID": uuid.uuid4().hex}
        commands: list[Command] = []
        for rank, line in enumerate(lines):
            place = rank_variables(network, rank, len(lines))
            commands.append((network.command(int(place["GROUP_RANK"]), line), {**job, **place}))
        return commands

    return start


def rank_variables(network: Network, rank: int, ranks: int) -> Mapping[str, str]:
    """Return torchrun's variables of a rank, with consecutive ranks on a node."""
    per_node = ranks // network.nodes
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        "MASTER_ADDR": network.address(0),
        "MASTER_PORT": str(PORT),
    }
