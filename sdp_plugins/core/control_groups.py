"""The control groups of this process: their folders, from the innermost outwards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders that may limit this process, of version 2 and of a v1 controller.

    Args:
        controller: Such as ``memory``.
        root: The folder that contains /proc and /sys.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            if line.count(":") < 2:  # some sandboxes write others
                continue
            _, controllers, path = line.split(":", 2)
            mounts = ["", "unified"] if not controllers else []
            mounts += [controller] if controller in controllers.split(",") else []
            for mount in mounts:
                top = root / "sys/fs/cgroup" / mount
                own = Path(path.lstrip("/"))
                # In a container the path may be the host's, of which only the top is visible.
                yield from (top / part for part in (own, *own.parents))


def cpu_quota(root: Path = Path("/")) -> float:
    """Return the number of cores whose time the control groups allow; infinite without a limit.

    Args:
        root: The folder that contains /proc and /sys.
    """
    found = [math.inf]
    for folder in folders("cpu", root):
        files = [("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        for names in files:  # of version 2, and 1; without a limit the first word is no number
            with suppress(OSError, ValueError, ZeroDivisionError):
                words = " ".join((folder / name).read_text() for name in names).split()
                if len(words) == 2 and words[0].isdecimal():
                    found.append(int(words[0]) / int(words[1]))
    return min(found)
