"""Files of control groups that are not as Linux writes them, as in some sandboxes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sdp_plugins.core.control_groups import cpu_quota, folders


def write(root: Path, groups: str, quota: str) -> None:
    """Describe a machine."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "sys/fs/cgroup/job").mkdir(parents=True)
    (root / "sys/fs/cgroup/job/cpu.max").write_text(quota)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("150000 100000\n", 1.5),
        ("100000 0\n", math.inf),
        ("100000 many\n", math.inf),
        ("100000\n", math.inf),
        ("\n", math.inf),
    ],
)
def test_a_quota_that_is_no_number_is_no_limit(tmp_path: Path, quota: str, cores: float) -> None:
    write(tmp_path, "0::/job\n", quota)
    assert cpu_quota(tmp_path) == cores


def test_a_malformed_line_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, "\nnonsense\n4:cpu\n:\n0::/job\n", "50000 100000\n")
    assert cpu_quota(tmp_path) == 0.5
    assert tmp_path / "sys/fs/cgroup/job" in {*folders("memory", tmp_path)}


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    write(tmp_path, "0::/job\n", "50000 100000\n")
    (tmp_path / "sys/fs/cgroup/job/cpu.max").write_bytes(b"\xff\xfe 1\n")
    assert cpu_quota(tmp_path) == math.inf
