"""Limits of processes: ulimit, and the number of processes of a control group."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from contextlib import suppress

from sdp_plugins.core.config import MIB
from sdp_plugins.core.control_groups import folders
from sdp_plugins.doctor.finding import Finding, error, ok, skipped, warning
from sdp_plugins.doctor.machine import Machine

GIB = 1024 * MIB
_PYTHONS_FILES = 64
_FILES_PER_RANK = 8  # of one group
_GROUPS = 4  # torch's default group, its extra groups, and those of the program
_ADDRESSES = 16 * GIB
_THREADS_PER_RANK = 16  # beside one per core


def _limit(kind: int) -> float:
    soft, _ = resource.getrlimit(kind)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def _remedy(option: str, kind: int, name: str, need: float, wanted: float = math.inf) -> str:
    """How to raise a limit: a shell can do it up to the hard limit only."""
    _, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY or wanted <= hard:
        return f"ulimit -{option} {'unlimited' if wanted == math.inf else wanted}"
    if need <= hard:
        return f"ulimit -S{option} $(ulimit -H{option})"
    return (
        f"have the administrator raise the hard limit, {hard}: {name} in "
        f"/etc/security/limits.conf, or docker run --ulimit {name}"
    )


def open_files(machine: Machine) -> Iterator[Finding]:
    """A rank may open the files of all peers."""
    allowed = _limit(resource.RLIMIT_NOFILE)
    least = _PYTHONS_FILES + _FILES_PER_RANK * machine.ranks
    wanted = _PYTHONS_FILES + _GROUPS * _FILES_PER_RANK * machine.ranks
    text = f"a rank may open {allowed:g} files"
    remedy = _remedy("n", resource.RLIMIT_NOFILE, "nofile", wanted, max(4096, wanted))
    if allowed < least:
        yield error(f"{text}, and a group of {machine.ranks} ranks needs about {least}", remedy)
    elif allowed < wanted:
        yield warning(f"{text}, and {_GROUPS} groups of {machine.ranks} ranks need more", remedy)
    else:
        yield ok(text)


def file_size(machine: Machine) -> Iterator[Finding]:
    """Shared memory may be as large as buckets are."""
    allowed = _limit(resource.RLIMIT_FSIZE)
    remedy = _remedy("f", resource.RLIMIT_FSIZE, "fsize", GIB)
    if allowed < 32 * MIB:
        yield error(
            f"shared memory may have {allowed / MIB:g} MiB, and a bucket of DDP has 25",
            remedy,
        )
    elif allowed < GIB:
        yield warning(f"shared memory may have {allowed / MIB:g} MiB", remedy)
    else:
        yield ok("files, and so shared memory, may be large")


def address_space(machine: Machine) -> Iterator[Finding]:
    """A rank may map the memory of all peers."""
    allowed = _limit(resource.RLIMIT_AS)
    if allowed < _ADDRESSES:
        yield warning(
            f"a rank may have {allowed / GIB:.1f} GiB of addresses for its and its peers' memory",
            _remedy("v", resource.RLIMIT_AS, "as", _ADDRESSES),
        )
    else:
        yield ok("a rank may use all addresses")


def processes(machine: Machine) -> Iterator[Finding]:
    """The ranks may start their threads."""
    need = machine.ranks * (machine.usable_cores + _THREADS_PER_RANK)
    for group in folders("pids", machine.root):
        with suppress(OSError, ValueError):
            most, now = (int((group / f"pids.{name}").read_text()) for name in ("max", "current"))
            if most - now < need:
                yield warning(
                    f"a control group allows {most - now} more threads, and {machine.ranks} ranks "
                    f"start about {need}",
                    "docker run --pids-limit -1 (Kubernetes: raise podPidsLimit)",
                )
                return
    allowed = math.inf if os.geteuid() == 0 else _limit(resource.RLIMIT_NPROC)
    if allowed < need:
        yield warning(
            f"this user may have {allowed:g} threads, and {machine.ranks} ranks start about {need}",
            _remedy("u", resource.RLIMIT_NPROC, "nproc", need),
        )
    else:
        yield ok("the ranks may start their threads")


def locked_memory(machine: Machine) -> Iterator[Finding]:
    """MPI may lock memory for InfiniBand."""
    devices = list((machine.root / "sys/class/infiniband").glob("*"))
    if not devices:
        yield skipped("there is no InfiniBand device")
    elif _limit(resource.RLIMIT_MEMLOCK) < GIB:
        yield warning(
            f"MPI may lock {_limit(resource.RLIMIT_MEMLOCK) // 1024:g} KiB, so it cannot use "
            f"{devices[0].name} for large messages",
            f"{_remedy('l', resource.RLIMIT_MEMLOCK, 'memlock', GIB)} (for ssh and mpirun: in "
            "limits.conf)",
            slows=True,
        )
    else:
        yield ok(f"MPI may lock memory for {devices[0].name}")
