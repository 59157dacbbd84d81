"""A job on hosts before it starts: the request, the checks, and mpirun's command line."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sdp_plugins.launch.hosts import addresses, forwarded, preflight
from sdp_plugins.launch.hosts import mpirun as mpis
from sdp_plugins.launch.hosts.host_list import parse_hostfile, parse_hosts, placed
from sdp_plugins.launch.hosts.launch_error import LaunchError
from sdp_plugins.launch.spawn import own_program


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
class Plan:
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
        names = forwarded.names(self.environment, job.exported)
        return mpis.mpirun_line(self.mpirun, self.places, names, agent)


def planned(job: HostJob) -> Plan:
    """Check that the job can be started, with the cheapest checks first.

    Raises:
        LaunchError: The job cannot be started.
    """
    if job.hosts and job.hostfile:
        raise LaunchError("--hosts and --hostfile are two lists of hosts. Hint: give one.")
    listed = parse_hostfile(job.hostfile) if job.hostfile else parse_hosts(job.hosts)
    places, token = placed(listed, job.ranks), secrets.token_hex(16)
    environment = forwarded.environment(
        os.environ, token=token, threads=job.threads, exported=job.exported
    )
    found = [addresses.resolve(host) for host in places]
    mpirun = mpis.find(job.mpirun, environment)
    others = [h for h, a in zip(places, found, strict=True) if not addresses.is_here(a)]
    preflight.check(mpirun, others, environment)
    return Plan(job, places, mpirun, found, environment, token)
