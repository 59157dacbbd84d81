"""What the command line asks for, made into a group of workers on hosts."""

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
    """Which hosts, and what starts ranks there.

    Attributes:
        hosts: As in `a:4,b:4`.
        hostfile: The same in a file.
        ranks: How many; None: as many as there are slots.
        mpirun: The user's choice.
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
    """A group of workers that can be started, as far as checks tell.

    Args:
        where: On which hosts.
        command: A rank's command line.
        threads: OMP_NUM_THREADS of each; None: as it is.
        master_port: On the first host; 0: one that is free.
        exported: NAME or NAME=VALUE.
        job_id: Of this job alone.

    Raises:
        LaunchError: It cannot.
    """
    if where.hosts and where.hostfile:
        raise LaunchError("--hosts and --hostfile are two lists. Hint: give one.")
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
