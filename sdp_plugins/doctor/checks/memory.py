"""Memory for the ranks, and for what they share."""

from __future__ import annotations

import os
from collections.abc import Iterator

from sdp_plugins.core.config import MIB
from sdp_plugins.core.memory_limits import available_bytes
from sdp_plugins.doctor.finding import Finding, ok, warning
from sdp_plugins.doctor.machine import Machine

RANK_BYTES = 256 * MIB
"""A rank that has imported torch, and its segment."""
_SWAPPED = 256 * MIB
_MAPPINGS = 16384
_DOCKER_SHM = 64 * MIB


def available_memory(machine: Machine) -> Iterator[Finding]:
    """The machine and the control groups have memory for the ranks."""
    free, need = available_bytes(machine.root), machine.ranks * RANK_BYTES
    if free < need:
        yield warning(
            f"{free // MIB} MiB of memory are left for {machine.ranks} ranks: buckets cannot move "
            "into shared memory, or the kernel kills a rank",
            "raise the container's limit (docker run --memory), or start fewer ranks",
            slows=True,
        )
    else:
        yield ok(f"{free // MIB} MiB of memory are left")


def swap(machine: Machine) -> Iterator[Finding]:
    """Memory of the ranks is not on a disk."""
    used = machine.memory.get("SwapTotal", 0) - machine.memory.get("SwapFree", 0)
    short = machine.memory.get("MemAvailable", 0) < machine.memory.get("MemTotal", 0) // 10
    if used > _SWAPPED and short:
        yield warning(
            f"{used // MIB} MiB are swapped out, and less than a tenth of the memory is available",
            "end other programs, or start fewer ranks",
            slows=True,
        )
    else:
        yield ok(f"{max(0, used) // MIB} MiB are swapped out")


def overcommit(machine: Machine) -> Iterator[Finding]:
    """The kernel lets ranks reserve memory."""
    if machine.number("proc/sys/vm/overcommit_memory") != 2:
        yield ok("the kernel lets processes reserve more memory than there is")
        return
    left = machine.memory.get("CommitLimit", 0) - machine.memory.get("Committed_AS", 0)
    if left < 4 * machine.ranks * RANK_BYTES:
        yield warning(
            f"vm.overcommit_memory=2 leaves {max(0, left) // MIB} MiB that may be reserved",
            "sudo sysctl vm.overcommit_memory=0",
        )
    else:
        yield ok(f"{left // MIB} MiB may be reserved")


def mappings(machine: Machine) -> Iterator[Finding]:
    """A process may map the registered buckets of all peers."""
    most = machine.number("proc/sys/vm/max_map_count")
    if most is not None and most < _MAPPINGS:
        yield warning(
            f"a process may have {most} mappings, and needs one for each bucket of each rank",
            "sudo sysctl vm.max_map_count=65530",
        )
    else:
        yield ok(f"a process may have {most} mappings")


def dev_shm(machine: Machine) -> Iterator[Finding]:
    """/dev/shm has room for data loaders and MPI; smddp's own memory does not count there."""
    folder = machine.root / "dev/shm"
    try:
        found = os.statvfs(folder)
    except OSError:
        yield warning("there is no /dev/shm, which data loaders and MPI need", _mount())
        return
    mounts = machine.text("proc/mounts").splitlines()
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    if found.f_flag & os.ST_RDONLY or not os.access(folder, os.W_OK):
        yield warning("/dev/shm is not writable, and data loaders and MPI write there", _mount())
    elif mounts and all(line.split()[1:2] != ["/dev/shm"] for line in mounts):
        yield warning("/dev/shm is a folder on a disk, not memory", _mount())
    elif total <= _DOCKER_SHM or free < _DOCKER_SHM:
        yield warning(
            f"/dev/shm has {free // MIB} of {total // MIB} MiB free: data loaders with workers, "
            "and MPI, fail with SIGBUS when it is full (smddp's own memory does not count there)",
            "docker run --shm-size=2g (Kubernetes: an emptyDir with medium: Memory)"
            if machine.container or total <= _DOCKER_SHM
            else "delete what is left in /dev/shm, or sudo mount -o remount,size=2G /dev/shm",
        )
    else:
        yield ok(f"/dev/shm has {free // MIB} MiB free")


def _mount() -> str:
    return "sudo mount -t tmpfs -o mode=1777,size=2G tmpfs /dev/shm"
