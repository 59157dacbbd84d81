"""How much memory this process may still take before somebody is killed for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

UNKNOWN = 2**63


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that the machine and our control groups can hand out.

    A shortage of it ends in a kill instead of an error. What cannot be read is no limit.

    Args:
        root: Where /proc and /sys are.
    """
    limits = [_of_machine(root / "proc/meminfo")]
    for folder in _cgroups(root):
        limits.append(_of_cgroup(folder, "memory.max", "memory.current"))
        limits.append(_of_cgroup(folder, "memory.limit_in_bytes", "memory.usage_in_bytes"))
    return min(limits)


def _of_machine(meminfo: Path) -> int:
    return 1024 * _fields(meminfo).get("MemAvailable:", UNKNOWN // 1024)


def _cgroups(root: Path) -> Iterator[Path]:
    """Folders of our own control groups with a memory controller, and of their ancestors."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            mounts = ["", "unified"] if not controllers else []
            mounts += ["memory"] if "memory" in controllers.split(",") else []
            for mount in mounts:
                top = root / "sys/fs/cgroup" / mount
                own = Path(path.lstrip("/"))
                # In a container the path may be the host's, of which we see only the top.
                yield from (top / part for part in (own, *own.parents))


def _of_cgroup(folder: Path, limit: str, usage: str) -> int:
    try:
        allowed = int((folder / limit).read_text())  # "max" is no number
        used = int((folder / usage).read_text())
    except (OSError, ValueError):
        return UNKNOWN
    # Usage counts the page cache too, which gives way before anybody is killed.
    stat = _fields(folder / "memory.stat")
    prefix = "total_" if "total_inactive_file" in stat else ""
    cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    return max(0, allowed - used + cache)


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number in each line."""
    fields: dict[str, int] = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[1].isdecimal():
                fields[words[0]] = int(words[1])
    return fields
