"""One rank of a job here, started as `main` with two arguments: JOB PROCESSES.

JOB has a folder for each host, which says what its ranks are. This process becomes that.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sdp_plugins.sagemaker.script import read_script

# What launchers say to a rank.
_OF_RANKS = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "NODE_RANK", "GROUP_", "MASTER_", "TORCHELASTIC_"),
    *("SMDATAPARALLEL_", "SDP_JOB_ID", "SDP_LAUNCHER_PID"),
)


def place(rank: int, size: int, processes: int) -> dict[str, str]:
    """Where a rank stands on its host.

    What says how ranks meet is left as it is: they are on one machine.

    Args:
        rank: Among all.
        size: How many there are.
        processes: How many each host has.
    """
    local, host, hosts = rank % processes, rank // processes, size // processes
    mode = "SMDATAPARALLEL_USE_HOMOGENEOUS" if hosts > 1 else "SMDATAPARALLEL_USE_SINGLENODE"
    found = {
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": processes,
        "NODE_RANK": host,
        "GROUP_RANK": host,
        "GROUP_WORLD_SIZE": hosts,
        "SMDATAPARALLEL_LOCAL_RANK": local,
        mode: 1,
    }
    return {name: str(value) for name, value in found.items()}


def become(job: Path, processes: int) -> None:
    """Become this rank's script.

    Args:
        job: The job's folder.
        processes: How many ranks a host has; 0: this is the only process, and no rank.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host = job / f"algo-{rank // processes + 1 if processes else 1}"
    command, variables = read_script(host)
    env = {**os.environ, **variables}
    if processes:
        env |= place(rank, size, processes)
    else:
        env = {name: value for name, value in env.items() if not name.startswith(_OF_RANKS)}
    os.chdir(host / "ml" / "code")
    paths = [os.getcwd(), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.execvpe(command[0], command, env)


def main() -> None:
    """What a rank's process does first."""
    become(Path(sys.argv[1]), int(sys.argv[2]))
