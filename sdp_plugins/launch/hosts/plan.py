"""A job on hosts before it starts: the request, the checks, and mpirun's command line."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sdp_plugins.launch.hosts import addresses, forwarded, preflight
from sdp_plugins.launch.hosts import mpirun as mpis
from sdp_plugins.launch.hosts.command_line import mpirun_line
from sdp_plugins.launch.spawn import own_program


@dataclass(frozen=True)
class HostJob:
    """The request.

    Attributes:
        command: A rank's command line.
        places: The hosts and their numbers of ranks.
        mpirun: The user's choice; None: the only one.
        threads: OMP_NUM_THREADS of each rank; None: no change.
        master_port: MASTER_PORT on the first host; 0: a free port.
        exported: NAME or NAME=VALUE, variables for the ranks.
        environment: Environment from which that of the ranks is made.
        job_id: Unique id of the job.
    """

    command: Sequence[str]
    places: Mapping[str, int]
    environment: Mapping[str, str]
    job_id: str
    mpirun: str | None = None
    threads: int | None = None
    master_port: int = 0
    exported: Sequence[str] = ()


@dataclass(frozen=True)
class Plan:
    """A job that has passed all checks.

    Attributes:
        job: The request.
        mpirun: The mpirun that starts it.
        addresses: Addresses of its hosts, in order.
        environment: Environment of mpirun.
        token: Proves that an agent belongs to this job.
    """

    job: HostJob
    mpirun: mpis.Mpirun
    addresses: Sequence[str]
    environment: Mapping[str, str]
    token: str

    def command(self, port: int) -> list[str]:
        """The command line of mpirun, for agents that connect to this port."""
        job, ours = self.job, ",".join(addresses.launchers(self.addresses))
        agent = own_program("sdp_plugins.launch.hosts.agent:main")
        agent += ["--launcher", f"{port}@{ours}", "--job", job.job_id]
        agent += ["--master-port", str(job.master_port)]
        names = forwarded.names(self.environment, job.exported)
        return mpirun_line(self.mpirun, job.places, names, agent)


def planned(job: HostJob) -> Plan:
    """Check that the job can be started, with the cheapest checks first.

    Raises:
        LaunchError: The job cannot be started.
    """
    token = secrets.token_hex(16)
    environment = forwarded.environment(
        job.environment, token=token, threads=job.threads, exported=job.exported
    )
    found = [addresses.resolve(host) for host in job.places]
    mpirun = mpis.find(job.mpirun, environment)
    others = [h for h, a in zip(job.places, found, strict=True) if not addresses.is_here(a)]
    preflight.check(mpirun, others, environment)
    return Plan(job, mpirun, found, environment, token)
