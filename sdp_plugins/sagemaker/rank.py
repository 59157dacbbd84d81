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

from sdp_plugins.launch.job_environment import without_place

SCRIPT = "script.json"
# SageMaker's toolkit and SMDDP set these for one job, but they may remain in a shell: a script
# would take an old SM_CHANNEL_* for a channel of the new job.
_OTHER_JOBS_PREFIXES = ("SM_", "SMDATAPARALLEL_")
# Other variables with these prefixes are settings of the SDK.
_OTHER_JOBS_NAMES = {
    "TRAINING_JOB_NAME",
    "TRAINING_JOB_ARN",
    "SAGEMAKER_JOB_NAME",
    "SAGEMAKER_PROGRAM",
    "SAGEMAKER_SUBMIT_DIRECTORY",
    "SAGEMAKER_BASE_DIR",
    "SAGEMAKER_TRAINING_MODULE",
    "SAGEMAKER_INSTANCE_TYPE",
}


def command_line(code: Path, entry_point: str, arguments: Sequence[str]) -> list[str]:
    """The command line by which SageMaker's toolkit starts an entry point in the folder of code.

    That is a Python script, a module of a package (if there is a setup.py), or any other program,
    which a shell starts.
    """
    path = Path(entry_point)
    if path.suffix == ".py" and not (code / "setup.py").exists():
        return [sys.executable, "-u", entry_point, *arguments]
    if path.suffix == ".py":
        return [sys.executable, "-u", "-m", path.stem, *arguments]
    (code / entry_point).chmod(0o755)
    return ["/bin/sh", "-c", f"./{shlex.join([entry_point, *arguments])}"]


def write_script(host: Path, command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Write the script of the ranks of a host with this folder.

    The command runs in the folder of the code; the variables are in addition to the launcher's.
    """
    (host / SCRIPT).write_text(json.dumps([[*command], {**variables}]))


def without_other_jobs(base: Mapping[str, str]) -> dict[str, str]:
    """`base` without the variables of ranks and of SageMaker's jobs."""
    return {
        name: value
        for name, value in without_place(base).items()
        if not name.startswith(_OTHER_JOBS_PREFIXES) and name not in _OTHER_JOBS_NAMES
    }


def place(rank: int, size: int, processes: int) -> dict[str, str]:
    """The variables of a rank's place on its host.

    Variables for the rendezvous stay as they are, because all ranks are on one machine.
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


def main() -> None:
    """Entry point: become the script of this rank; PROCESSES 0: of a process that is no rank."""
    job, processes = Path(sys.argv[1]), int(sys.argv[2])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host = job / f"algo-{rank // processes + 1 if processes else 1}"
    command, variables = json.loads((host / SCRIPT).read_text())
    if processes:
        env = {**os.environ, **variables, **place(rank, size, processes)}
    else:
        env = without_other_jobs(os.environ) | variables
    os.chdir(host / "ml" / "code")
    paths = [os.getcwd(), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.execvpe(command[0], command, env)
