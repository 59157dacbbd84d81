"""Whether what a process holds grows: samples of a quiet process, and the verdict on a run of them.

A sample is taken when nothing is in flight, only the default group lives, garbage is collected and
free memory given back. The first quarter of the samples is warm-up. What can be counted exactly
(descriptors, threads, mappings of memory files) must never exceed in the second half of the rest
what it was before. Of what fluctuates (memory) the median of the second half must not lie more than
a limit above that of the first half.
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
"""By how much medians may differ: bytes, and Python's allocated blocks.

The arenas that malloc keeps for threads fill with holes, ever more slowly, while what it has handed
out stays: hence 2 % for what is resident, and little for `heap`.
"""
BLOCKS_OF_GROUP = 2
"""torch keeps these of each group that was made, over any backend; they are not counted."""
EXACT = ("fds", "threads", "memory_files")
LEAST_SAMPLES = 8
"""With fewer there is no verdict on memory."""


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
    """What a process holds.

    Attributes:
        rss: Resident bytes.
        pss: The same, shared pages divided among those that share them.
        anonymous: Resident bytes that are no file's and no peer's.
        heap: Bytes that malloc has handed out.
        blocks: Blocks that Python's allocator has handed out, less BLOCKS_OF_GROUP.
        fds: Open descriptors.
        threads: Of the kernel.
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
    """Look at this process, which has made so many groups."""
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
    """What grew, and how."""
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
    """First, middle and last sample in a line each."""
    chosen = {0: "first", len(samples) // 2: "middle", len(samples) - 1: "last"}
    return "\n".join(f"  {name:6} {in_words(samples[at])}" for at, name in chosen.items())


def in_words(one: Sample) -> str:
    bytes_of = ("rss", "pss", "anonymous", "heap")
    return "  ".join(
        f"{name} {value / 2**20:.1f} MiB" if name in bytes_of else f"{name} {value}"
        for name, value in asdict(one).items()
    )
