"""The memory that this process can still allocate before the kernel kills a process for it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from .control_groups import folders

UNKNOWN = 2**63


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that the machine and this process's control groups can still provide.

    Exceeding it ends in a kill instead of an error. Unreadable values count as no limit.

    Args:
        root: The folder that contains /proc and /sys.
    """
    limits = [1024 * numbers_in(root / "proc/meminfo").get("MemAvailable:", UNKNOWN // 1024)]
    for folder in folders("memory", root):
        limits.append(_of_cgroup(folder, "memory.max", "memory.current"))
        limits.append(_of_cgroup(folder, "memory.limit_in_bytes", "memory.usage_in_bytes"))
    return min(limits)


def _of_cgroup(folder: Path, limit: str, usage: str) -> int:
    try:
        allowed = int((folder / limit).read_text())  # "max" is no number
        used = int((folder / usage).read_text())
    except (OSError, ValueError):
        return UNKNOWN
    # Usage includes the page cache, which the kernel frees before it kills a process.
    stat = numbers_in(folder / "memory.stat")
    prefix = "total_" if "total_inactive_file" in stat else ""
    cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    return max(0, allowed - used + cache)


def numbers_in(path: Path) -> dict[str, int]:
    """Read a file with one name and one number in each line."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[1].isdecimal():
                found[words[0]] = int(words[1])
    return found
