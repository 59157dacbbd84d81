"""Removes the variables of other launchers from the environment that ranks inherit."""

from __future__ import annotations

from collections.abc import Mapping

# An outer launcher describes this process, not our ranks, and frameworks would read its variables:
# Lightning prefers Slurm's to torchrun's.
STALE_PREFIXES = ("OMPI_COMM_", "PMI_", "PMIX_", "MPI_LOCAL", "TORCHELASTIC_", "SLURM_STEP")
STALE_NAMES = {
    "SDP_LAUNCHER_PID",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_TASK_PID",
}
# torchrun's variables, which this package's launchers also set: the place of a rank in its job.
PLACE = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SDP_JOB_ID",
}


def without_launchers(base: Mapping[str, str]) -> dict[str, str]:
    """`base` without the variables in which other launchers describe this process."""
    return {
        name: value
        for name, value in base.items()
        if not name.startswith(STALE_PREFIXES) and name not in STALE_NAMES
    }


def without_place(base: Mapping[str, str]) -> dict[str, str]:
    """`base` without all variables that make a process a rank of a job."""
    return {name: value for name, value in without_launchers(base).items() if name not in PLACE}
