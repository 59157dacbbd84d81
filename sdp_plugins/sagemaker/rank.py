"""One rank of a job on this machine, started as `main` with two arguments: JOB PROCESSES.

JOB has a folder per host with the script of its ranks, which this process becomes.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SCRIPT = "script.json"
# Variables that launchers set for a rank.
_OF_RANKS = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "NODE_RANK", "GROUP_", "MASTER_", "TORCHELASTIC_"),
    *("SMDATAPARALLEL_", "SDP_JOB_ID", "SDP_LAUNCHER_PID"),
)


def command_line(code: Path, entry_point: str, arguments: Sequence[str]) -> list[str]:
    """The command line by which SageMaker's toolkit starts an entry point.

    Args:
        code: The folder of code.
        entry_point: A Python script, a module of a package (if there is a setup.py), or any other
            program, which a shell starts.
        arguments: The entry point's arguments.
    """
    path = Path(entry_point)
    if path.suffix == ".py" and not (code / "setup.py").exists():
        return [sys.executable, "-u", entry_point, *arguments]
    if path.suffix == ".py":
        return [sys.executable, "-u", "-m", path.stem, *arguments]
    (code / entry_point).chmod(0o755)
    return ["/bin/sh", "-c", f"./{shlex.join([entry_point, *arguments])}"]


def write_script(host: Path, command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Write the script of a host's ranks.

    Args:
        host: The host's folder.
        command: Command line, run in the folder of the code.
        variables: Variables in addition to the launcher's.
    """
    (host / SCRIPT).write_text(json.dumps([[*command], {**variables}]))


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
    command, variables = json.loads((host / SCRIPT).read_text())
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
