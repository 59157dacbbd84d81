"""A job on hosts before it starts: the request, the checks, and mpirun's command line."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class HostPlan:
    """A job that has passed all checks.

    Attributes:
        job: The request.
        places: The hosts and their numbers of ranks.
        mpirun: The mpirun that starts it.
        addresses: Addresses of its hosts, in order.
        environment: Environment of mpirun.
        token: Proves that an agent belongs to this job.
    """

    job: HostJob
    places: Mapping[str, int]
    mpirun: mpis.Mpirun
    addresses: Sequence[str]
    environment: Mapping[str, str]
    token: str

    def command(self, port: int) -> list[str]:
        """The command line of mpirun, for agents that connect to this port."""
        job, ours = self.job, ",".join(addresses.launchers(self.addresses))
        agent = own_program("sdp_plugins.launch.hosts.agent:main")
        agent += [f"{port}@{ours}", str(job.master_port)]
        names = forwarded_names(self.environment, job.exported)
        return mpis.mpirun_line(self.mpirun, self.places, names, agent)


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
    mpirun = mpis.find(job.mpirun, environment)
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
