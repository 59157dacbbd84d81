"""A job on hosts before it starts: what was asked for, the checks, and mpirun's command line."""

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
    """What to start, and where.

    Attributes:
        command: A rank's command line.
        places: The hosts and how many ranks each has.
        mpirun: The user's choice; None: the one that there is.
        threads: OMP_NUM_THREADS of each rank; None: as it is.
        master_port: On the first host; 0: one that is free.
        exported: NAME or NAME=VALUE, variables for the ranks.
        environment: What theirs is made from.
        job_id: Of this job alone.
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
        job: What to start.
        mpirun: By which.
        addresses: Of its hosts, in order.
        environment: mpirun's.
        token: By which its agents are known.
    """

    job: HostJob
    mpirun: mpis.Mpirun
    addresses: Sequence[str]
    environment: Mapping[str, str]
    token: str

    def command(self, port: int) -> list[str]:
        """Mpirun's command line, for agents that call at this port."""
        job, ours = self.job, ",".join(addresses.launchers(self.addresses))
        agent = own_program("sdp_plugins.launch.hosts.agent:main")
        agent += ["--launcher", f"{port}@{ours}", "--job", job.job_id]
        agent += ["--master-port", str(job.master_port)]
        names = forwarded.names(self.environment, job.exported)
        return mpirun_line(self.mpirun, job.places, names, agent)


def planned(job: HostJob) -> Plan:
    """See that the job can be started, the cheapest checks first.

    Raises:
        LaunchError: It cannot.
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
