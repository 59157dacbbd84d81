"""Makes a group of workers on hosts from the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sdp_plugins.launch.hosts.host_list import parse_hostfile, parse_hosts, placed
from sdp_plugins.launch.hosts.launch_error import LaunchError
from sdp_plugins.launch.hosts.plan import HostJob, planned
from sdp_plugins.launch.hosts.worker_group import RanksOnHosts


@dataclass(frozen=True)
class Where:
    """The hosts, and the mpirun that starts ranks there.

    Attributes:
        hosts: Such as `a:4,b:4`.
        hostfile: The same in a file.
        ranks: Number of ranks; None: as many as there are slots.
        mpirun: The user's choice; None: the only one.
    """

    hosts: str
    hostfile: Path | None
    ranks: int | None
    mpirun: str | None


def requested(
    where: Where,
    command: Sequence[str],
    *,
    threads: int | None,
    master_port: int,
    exported: Sequence[str],
    job_id: str,
) -> RanksOnHosts:
    """Check the request, and make the group of workers.

    Args:
        where: The hosts.
        command: A rank's command line.
        threads: OMP_NUM_THREADS of each rank; None: no change.
        master_port: MASTER_PORT on the first host; 0: a free port.
        exported: NAME or NAME=VALUE, variables for the ranks.
        job_id: Unique id of the job.

    Raises:
        LaunchError: The job cannot be started.
    """
    if where.hosts and where.hostfile:
        raise LaunchError("--hosts and --hostfile are two lists of hosts. Hint: give one.")
    found = parse_hostfile(where.hostfile) if where.hostfile else parse_hosts(where.hosts)
    job = HostJob(
        command=command,
        places=placed(found, where.ranks),
        environment=os.environ,
        mpirun=where.mpirun,
        threads=threads,
        master_port=master_port,
        exported=exported,
        job_id=job_id,
    )
    return RanksOnHosts(planned(job))
