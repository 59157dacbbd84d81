"""One rank of a job on this machine, started as `main` with two arguments: JOB PROCESSES.

JOB has a folder per host with the script of its ranks, which this process becomes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sdp_plugins.sagemaker.script import read_script

# Variables that launchers set for a rank.
_OF_RANKS = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "NODE_RANK", "GROUP_", "MASTER_", "TORCHELASTIC_"),
    *("SMDATAPARALLEL_", "SDP_JOB_ID", "SDP_LAUNCHER_PID"),
)


def place(rank: int, size: int, processes: int) -> dict[str, str]:
    """The variables of a rank's place on its host.

    Variables for the rendezvous stay as they are, because all ranks are on one machine.

    Args:
        rank: The rank in the job.
        size: Number of ranks.
        processes: Ranks per host.
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
        processes: Ranks per host; 0: a single process that is not a rank.
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
    """Entry point of a rank's process."""
    become(Path(sys.argv[1]), int(sys.argv[2]))
