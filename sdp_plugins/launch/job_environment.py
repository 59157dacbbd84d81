"""The environment that all ranks of a job share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from sdp_plugins.core.addresses_and_ports import LOOPBACK, free_port
from sdp_plugins.core.config import registers
from sdp_plugins.launch.rank_count import usable_cores

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
TUNABLES = "GLIBC_TUNABLES"
PRELOAD = "LD_PRELOAD"
MOST_ENGINE_THREADS = 4
"""A few threads use all of a memory bus."""
_HUGE_PAGES = "glibc.malloc.hugetlb"
_SHARED_MALLOC = "libsdp_shared_malloc.so"


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


def torchelastic(job_id: str) -> dict[str, str]:
    """The variables by which torch and Lightning recognize a job that a launcher has started."""
    return {
        "TORCHELASTIC_RUN_ID": job_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that makes malloc use huge pages; a value that the user has set is kept.

    Frameworks allocate new memory for the gradients of every step, and the C library returns it to
    the kernel afterwards. Each page of 4 KiB then costs a page fault in every step; pages of 2 MiB
    nearly remove that cost. They must be requested before a process starts. The C library before
    glibc 2.35 ignores the request, and so does a kernel that does not allow huge pages.
    """
    tunables = environment.get(TUNABLES, "")
    if _HUGE_PAGES in tunables:
        return {TUNABLES: tunables}
    return {TUNABLES: ":".join(filter(None, [tunables, f"{_HUGE_PAGES}=1"]))}


def shared_malloc(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that loads the library of `core.shared_malloc`, before others that the user has.

    It must be loaded when a process starts, and does nothing until a group asks for it. Paths in
    this variable cannot have spaces or colons. With ``SDP_REGISTER=0`` it is left as it is.
    """
    native = find_spec("sdp_plugins.core._native")
    library = str(Path(native.origin).with_name(_SHARED_MALLOC)) if native and native.origin else ""
    loaded = environment.get(PRELOAD, "")
    is_there = os.path.exists(library) and not set(library) & set(": ")
    if not is_there or not registers(environment) or _SHARED_MALLOC in loaded:
        return {}
    return {PRELOAD: ":".join(filter(None, [library, loaded]))}


def free_threads(environment: Mapping[str, str], cores: int) -> int:
    """How many threads may share the work of a rank's reductions: its cores that no other uses."""
    framework = environment["OMP_NUM_THREADS"].split(",")[0]  # of nested regions
    used = int(framework) if framework.isdecimal() else cores
    return max(1, min(MOST_ENGINE_THREADS, cores - used))


def job_environment(
    base: Mapping[str, str], world_size: int, threads: int | None, job_id: str
) -> dict[str, str]:
    """The variables that are equal on all ranks of a job on this machine.

    Args:
        base: The launcher's variables; those of other launchers are removed.
        world_size: Number of ranks.
        threads: OMP_NUM_THREADS of each rank; None: its share of the cores, unless it is set.
        job_id: Unique id of the job.
    """
    environment = without_launchers(base) | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port()),
        "SDP_JOB_ID": job_id,
    }
    environment |= torchelastic(job_id)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    share = max(1, usable_cores() // world_size)
    environment.setdefault("OMP_NUM_THREADS", str(share))
    if (threads := free_threads(environment, share)) > 1:
        environment.setdefault("SDP_ENGINE_THREADS", str(threads))
    return environment | huge_pages(environment) | shared_malloc(environment)
