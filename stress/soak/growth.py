"""Growth of a process's resources: samples of an idle process, and the verdict on them.

A sample is taken when nothing is in flight, only the default group exists, garbage is collected and
free memory is returned. The first quarter of the samples is warm-up. Countable resources
(descriptors, threads, mappings of memory files) must not exceed in the second half of the remaining
samples the maximum of all earlier samples. For fluctuating resources (memory), the median of the
second half must not exceed that of the first half by more than a limit.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

KIB = 1024
MIB = 2**20
LIMITS = {"rss": 8 * MIB, "pss": 8 * MIB, "anonymous": 8 * MIB, "heap": MIB, "blocks": 5000}
"""The permitted difference of medians: bytes, and Python's allocated blocks.

malloc's arenas for threads fragment, ever more slowly, while the allocated bytes stay constant. The
limit is therefore 2 % for resident memory, and small for `heap`.
"""
BLOCKS_OF_GROUP = 2
"""torch keeps these blocks of each group, over any backend; the samples exclude them."""
EXACT = ("fds", "threads", "memory_files")
LEAST_SAMPLES = 8
"""With fewer samples there is no verdict on memory."""


class Mallinfo(ctypes.Structure):
    """glibc's mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


@dataclass(frozen=True)
class Sample:
    """The resources of a process.

    Attributes:
        rss: Resident bytes.
        pss: Resident bytes, each shared page divided by the number of processes that map it.
        anonymous: Resident bytes that belong to no file and no peer.
        heap: Bytes that malloc has allocated.
        blocks: Blocks that Python's allocator has allocated, less BLOCKS_OF_GROUP for each group.
        fds: Open descriptors.
        threads: The kernel's threads.
        memory_files: Mappings of memfds and of files in /dev/shm.
    """

    rss: int
    pss: int
    anonymous: int
    heap: int
    blocks: int
    fds: int
    threads: int
    memory_files: int


def sample(groups: int = 0) -> Sample:
    """Take a sample of this process, which has created `groups` groups."""
    libc = ctypes.CDLL(None)
    for _ in range(2):
        gc.collect()
    libc.malloc_trim(0)
    rollup = {
        line.split(":")[0]: KIB * int(line.split()[1])
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    }
    return Sample(
        rss=rollup["Rss"],
        pss=rollup["Pss"],
        anonymous=rollup["Anonymous"],
        heap=heap_bytes(libc),
        blocks=sys.getallocatedblocks() - BLOCKS_OF_GROUP * groups,
        fds=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        memory_files=memory_files(),
    )


def heap_bytes(libc: ctypes.CDLL) -> int:
    libc.mallinfo2.restype = Mallinfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def memory_files() -> int:
    maps = Path("/proc/self/maps").read_text()
    return maps.count("/memfd:") + maps.count("/dev/shm/")


def growth(samples: list[Sample]) -> dict[str, str]:
    """Return the resources that grew, with a description."""
    warm = len(samples) // 4
    middle = warm + (len(samples) - warm) // 2
    found = {}
    for field in fields(Sample):
        series = [getattr(one, field.name) for one in samples]
        if field.name in EXACT:
            before, after = max(series[:middle], default=0), max(series[middle:], default=0)
            limit = 0
        elif len(samples) < LEAST_SAMPLES:
            continue
        else:
            before, after = int(median(series[warm:middle])), int(median(series[middle:]))
            limit = LIMITS[field.name]
        if after - before > limit:
            found[field.name] = f"from {before} to {after}, the limit is {limit} more"
    return found


def described(samples: list[Sample]) -> str:
    """Return the first, middle and last sample, one per line."""
    chosen = {0: "first", len(samples) // 2: "middle", len(samples) - 1: "last"}
    return "\n".join(f"  {name:6} {in_words(samples[at])}" for at, name in chosen.items())


def in_words(one: Sample) -> str:
    bytes_of = ("rss", "pss", "anonymous", "heap")
    return "  ".join(
        f"{name} {value / 2**20:.1f} MiB" if name in bytes_of else f"{name} {value}"
        for name, value in asdict(one).items()
    )
