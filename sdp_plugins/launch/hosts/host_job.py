"""A job on hosts before it starts: the request, the checks, and the command lines."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sdp_plugins.launch.hosts import LaunchError, addresses, preflight
from sdp_plugins.launch.hosts import mpirun as mpis
from sdp_plugins.launch.hosts.agent_messages import TOKEN
from sdp_plugins.launch.hosts.host_list import parse_hostfile, parse_hosts, placed
from sdp_plugins.launch.job_environment import huge_pages, without_place
from sdp_plugins.launch.spawn import own_program

# The variables that ranks on other hosts get from here. mpirun's command line has only their names,
# and mpirun sends the values over its connections: everybody on a host can read command lines.
# Other variables are not sent, because an environment may hold passwords; `-x NAME` adds one.
FORWARDED = {
    "PATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "VIRTUAL_ENV",
    "GLIBC_TUNABLES",
    "LANG",
    "TZ",
    TOKEN,
}
FORWARDED_PREFIXES = (
    *("SDP_", "PYTHON", "LC_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NUMEXPR_"),  # threads
    *("TORCH", "PYTORCH", "GLOO_", "NCCL_", "KERAS_", "TF_", "XLA_", "JAX_"),
    *("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "MPIR_CVAR_", "MPICH_", "I_MPI_", "MPI4PY_"),
    *("UCX_", "FI_"),
)
# MPICH's mpirun (5.0), given a list of names, loses the last variable of its environment.
_LAST = "SDP_LAUNCH_END"


@dataclass(frozen=True)
class HostJob:
    """The request on the command line.

    Attributes:
        command: A rank's command line.
        hosts: Such as `a:4,b:4`.
        hostfile: The same in a file.
        ranks: Number of ranks; None: as many as there are slots.
        mpirun: The user's choice; None: the only one.
        threads: OMP_NUM_THREADS of each rank; None: no change.
        master_port: MASTER_PORT on the first host; 0: a free port.
        exported: NAME or NAME=VALUE, variables for the ranks.
        job_id: Unique id of the job.
        elastic: Whether it outlives ranks and hosts. mpirun would end it: each host's agents are
            started by ssh.
    """

    command: Sequence[str]
    hosts: str
    hostfile: Path | None
    ranks: int | None
    mpirun: str | None
    threads: int | None
    master_port: int
    exported: Sequence[str]
    job_id: str
    elastic: bool = False


class AgentStart(NamedTuple):
    """How a program starts agents.

    Attributes:
        name: The program's, or that of the host.
        ranks: Those of the agents.
        line: The command line.
        stdin: What it reads.
    """

    name: str
    ranks: range
    line: Sequence[str]
    stdin: bytes = b""


@dataclass(frozen=True)
class HostPlan:
    """A job that has passed all checks.

    Attributes:
        job: The request.
        places: The hosts and their numbers of ranks.
        mpirun: The mpirun that starts it; None: ssh does.
        addresses: Addresses of its hosts, in order.
        environment: Environment of the programs that start it.
        token: Proves that an agent belongs to this job.
    """

    job: HostJob
    places: Mapping[str, int]
    mpirun: mpis.Mpirun | None
    addresses: Sequence[str]
    environment: Mapping[str, str]
    token: str

    def starts(self, port: int) -> list[AgentStart]:
        """How the agents are started, which connect to this port."""
        launcher = f"{port}@{','.join(addresses.launchers(self.addresses))}"
        names = forwarded_names(self.environment, self.job.exported)
        if self.mpirun is None:
            return list(self._by_ssh(launcher, {name: self.environment[name] for name in names}))
        agent = own_program("sdp_plugins.launch.hosts.agent:main")
        agent += [launcher, str(self.job.master_port)]
        line = mpis.mpirun_line(self.mpirun, self.places, names, agent)
        return [AgentStart("mpirun", range(sum(self.places.values())), line)]

    def _by_ssh(self, launcher: str, environment: Mapping[str, str]) -> Iterator[AgentStart]:
        program, first = preflight.agent(None, self.environment), 0
        python = own_program("sdp_plugins.launch.hosts.host_agents:main")
        assert program
        for node, (host, address) in enumerate(zip(self.places, self.addresses, strict=True)):
            ranks = range(first, first + self.places[host])
            given = {
                "arguments": [launcher, str(self.job.master_port)],
                "folder": os.getcwd(),
                "environment": {
                    **environment,
                    "SDP_JOB_ID": self.job.job_id,
                    "WORLD_SIZE": str(sum(self.places.values())),
                    "LOCAL_WORLD_SIZE": str(len(ranks)),
                    "NODE_RANK": str(node),
                },
                "first": first,
            }
            line = python
            if not addresses.is_here(address):
                shell = preflight.for_a_shell(python, self.environment)
                line = [*preflight.reaching(program, host), shell]
            yield AgentStart(host, ranks, line, json.dumps(given).encode())
            first = ranks.stop


def planned(job: HostJob) -> HostPlan:
    """Check that the job can be started, with the cheapest checks first.

    Raises:
        LaunchError: The job cannot be started.
    """
    if job.hosts and job.hostfile:
        raise LaunchError("--hosts and --hostfile are two lists of hosts. Hint: give one.")
    listed = parse_hostfile(job.hostfile) if job.hostfile else parse_hosts(job.hosts)
    places, token = placed(listed, job.ranks), secrets.token_hex(16)
    environment = mpirun_environment(
        os.environ, token=token, threads=job.threads, exported=job.exported
    )
    found = [addresses.resolve(host) for host in places]
    if job.elastic and environment.get("SDP_INTERNODE", "").lower() == "mpi":
        raise LaunchError(
            "SDP_INTERNODE=mpi: MPI ends a job that loses a rank, so --elastic uses gloo. "
            "Hint: unset SDP_INTERNODE."
        )
    mpirun = None if job.elastic else mpis.find(job.mpirun, environment)
    others = [h for h, a in zip(places, found, strict=True) if not addresses.is_here(a)]
    preflight.check(mpirun, others, environment)
    return HostPlan(job, places, mpirun, found, environment, token)


def mpirun_environment(
    base: Mapping[str, str], *, token: str, threads: int | None, exported: Sequence[str]
) -> dict[str, str]:
    """The environment of mpirun, and so of the ranks on this machine; see `HostPlan`."""
    kept = without_place(base) | huge_pages(base)
    if threads is not None:
        kept["OMP_NUM_THREADS"] = str(threads)
    for text in exported:
        name, equals, value = text.partition("=")
        if equals:
            kept[name] = value
        elif name not in kept:
            raise LaunchError(f"-x {name}: the variable is not set here. Hint: -x {name}=VALUE.")
    return kept | {TOKEN: token, _LAST: ""}


def forwarded_names(environment: Mapping[str, str], exported: Sequence[str]) -> list[str]:
    """The names of the variables that mpirun forwards."""
    asked = {text.partition("=")[0] for text in exported}
    chosen = {
        n for n in environment if n in FORWARDED or n in asked or n.startswith(FORWARDED_PREFIXES)
    }
    return sorted(chosen - {_LAST})
