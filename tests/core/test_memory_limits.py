"""The limits that count: the machine's and those of all control groups that we are in."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdp_plugins.core.memory_limits import UNKNOWN, available_bytes

MIB = 2**20


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(folder: str, limit: str, used: int) -> dict[str, str]:
    top = f"sys/fs/cgroup/{folder}"
    return {f"{top}memory.max": f"{limit}\n", f"{top}memory.current": f"{used}\n"}


MEMINFO = {"proc/meminfo": f"MemTotal: 9000000 kB\nMemAvailable: {500 * 1024} kB\nHugePages: 0\n"}
OWN = {"proc/self/cgroup": "0::/pod/box\n"}
V1 = {
    "proc/self/cgroup": "5:cpu,memory:/docker/x\n1:name=systemd:/\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{100 * MIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{90 * MIB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"cache 5\ntotal_inactive_file {7 * MIB}\n",
}
STAT = {"sys/fs/cgroup/pod/memory.stat": f"active_file {MIB}\ninactive_file {2 * MIB}\nanon 3\n"}
POD = v2("pod/", str(200 * MIB), 180 * MIB)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, UNKNOWN),
        (MEMINFO, 500 * MIB),
        (MEMINFO | OWN, 500 * MIB),
        (MEMINFO | OWN | v2("pod/box/", str(80 * MIB), 30 * MIB), 50 * MIB),
        (MEMINFO | OWN | v2("pod/box/", "max", 30 * MIB), 500 * MIB),
        (MEMINFO | OWN | v2("pod/box/", "max", 0) | POD, 20 * MIB),  # an ancestor's limit
        (MEMINFO | OWN | POD | STAT, 23 * MIB),  # page cache gives way
        (MEMINFO | OWN | v2("", str(40 * MIB), 41 * MIB), 0),  # a container's view of its own
        (MEMINFO | OWN | v2("pod/", "nonsense", 1), 500 * MIB),
        (MEMINFO | V1, 17 * MIB),
    ],
)
def test_the_least_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_bytes(machine(tmp_path, files)) == expected


def test_this_machine() -> None:
    assert 0 < available_bytes() < UNKNOWN
