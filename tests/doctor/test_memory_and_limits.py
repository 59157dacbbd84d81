"""Faults of memory, of limits, and of what the kernel allows."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.doctor.machines import (
    healthy,
    needs_namespaces,
    own_shared_memory,
    problem,
    real_problem,
    write,
)

MIB = 2**20

# ---- limits of a real process --------------------------------------------------------------------


def limit(kind: int, value: int, hard: int | None = None) -> Callable[[], None]:
    most = resource.getrlimit(kind)[1] if hard is None else hard
    return partial(resource.setrlimit, kind, (value, most))


def test_open_files() -> None:
    found = real_problem("open-files", limit(resource.RLIMIT_NOFILE, 70))
    assert found["status"] == "error" and found["remedy"] == "ulimit -n 4096"
    found = real_problem("open-files", limit(resource.RLIMIT_NOFILE, 100))
    assert found["status"] == "warning"


@pytest.mark.parametrize(
    ("kind", "check", "name", "value"),
    [
        (resource.RLIMIT_NOFILE, "open-files", "nofile", 70),
        (resource.RLIMIT_FSIZE, "file-size", "fsize", 16 * MIB),
        (resource.RLIMIT_AS, "address-space", "as", 8 * 2**30),
    ],
)
def test_a_hard_limit(kind: int, check: str, name: str, value: int) -> None:
    """No shell can raise it."""
    found = real_problem(check, limit(kind, value, value))
    assert found["remedy"] == (
        f"have the administrator raise the hard limit, {value}: {name} in "
        f"/etc/security/limits.conf, or docker run --ulimit {name}"
    )


def test_a_hard_limit_that_suffices() -> None:
    found = real_problem("open-files", limit(resource.RLIMIT_NOFILE, 100, 1000))
    assert found["remedy"] == "ulimit -Sn $(ulimit -Hn)"


def test_the_size_of_files() -> None:
    found = real_problem("file-size", limit(resource.RLIMIT_FSIZE, 16 * MIB))
    assert found["status"] == "error" and found["remedy"] == "ulimit -f unlimited"
    assert "16 MiB" in found["text"]
    found = real_problem("file-size", limit(resource.RLIMIT_FSIZE, 100 * MIB))
    assert found["status"] == "warning"


def test_addresses() -> None:
    found = real_problem("address-space", limit(resource.RLIMIT_AS, 8 * 2**30))
    assert found["remedy"] == "ulimit -v unlimited" and "8.0 GiB" in found["text"]


def test_processes_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit does not hold for root."""
    machine = healthy(tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (20, resource.RLIM_INFINITY))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = problem(machine, "processes")
    assert found.text.startswith("this user may have 20 threads, and 2 ranks start about 40")
    assert found.remedy == "ulimit -u unlimited"


def test_locked_memory_for_infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = healthy(tmp_path)
    write(tmp_path, {"sys/class/infiniband/mlx5_0/node_type": "1: CA\n"})
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64 * 1024, resource.RLIM_INFINITY))
    found = problem(machine, "locked-memory")
    assert "64 KiB" in found.text and "mlx5_0" in found.text
    assert found.remedy.startswith("ulimit -l unlimited")


# ---- a real /dev/shm -----------------------------------------------------------------------------


@needs_namespaces
def test_a_small_dev_shm() -> None:
    found = real_problem("dev-shm", partial(own_shared_memory, b"size=64m"))
    assert "64 of 64 MiB free" in found["text"]
    assert found["remedy"].startswith("docker run --shm-size=2g")


@needs_namespaces
def test_a_dev_shm_that_is_full() -> None:
    def fill() -> None:
        own_shared_memory(b"size=256m")
        with open("/dev/shm/left", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 200 * MIB)

    found = real_problem("dev-shm", fill)
    assert "56 of 256 MiB free" in found["text"]


def test_no_dev_shm(tmp_path: Path) -> None:
    machine = healthy(tmp_path)
    (tmp_path / "dev/shm/.keep").unlink()
    (tmp_path / "dev/shm").rmdir()
    assert problem(machine, "dev-shm").remedy.startswith("sudo mount -t tmpfs")
    (tmp_path / "dev/shm").mkdir()
    write(tmp_path, {"proc/mounts": "overlay / overlay rw 0 0\n"})
    found = problem(machine, "dev-shm")
    assert "a folder on a disk" in found.text and found.remedy.startswith("sudo mount -t tmpfs")


# ---- system calls that a sandbox refuses ---------------------------------------------------------

SYSTEM_CALLS = {
    "x86_64": {"memfd_create": 319, "pidfd_open": 434, "sendmsg": 46},
    "aarch64": {"memfd_create": 279, "pidfd_open": 434, "sendmsg": 211},
}
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2
RETURN_EPERM, RETURN_ALLOW = 0x00050001, 0x7FFF0000


def refuse(name: str) -> None:
    """Have the kernel answer one system call with EPERM, as container runtimes do."""
    number = SYSTEM_CALLS[platform.machine()][name]
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (0x20, 0, 0, 0),  # load the call's number
            (0x15, 0, 1, number),  # unless it is this one, skip an instruction
            (0x06, 0, 0, RETURN_EPERM),
            (0x06, 0, 0, RETURN_ALLOW),
        )
    )
    code = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", 4, ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for arguments in ((NO_NEW_PRIVILEGES, 1, 0, 0, 0), (SET_SECCOMP, FILTER, header, 0, 0)):
        if prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


@pytest.mark.skipif(platform.machine() not in SYSTEM_CALLS, reason="other numbers of system calls")
@pytest.mark.parametrize(
    ("call", "check", "status"),
    [
        ("memfd_create", "shared-memory", "error"),
        ("pidfd_open", "end-of-processes", "warning"),
        ("sendmsg", "local-sockets", "error"),
    ],
)
def test_a_sandbox(call: str, check: str, status: str) -> None:
    found = real_problem(check, partial(refuse, call))
    assert found["status"] == status and "Operation not permitted" in found["text"]
    assert "seccomp profile that allows" in found["remedy"]


# ---- of machines that files describe -------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "files", "remedy"),
    [
        (
            "available-memory",
            {"sys/fs/cgroup/job/memory.max": f"{300 * MIB}\n"},
            "docker run --memory",
        ),
        (
            "swap",
            {
                "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 900000 kB\n"
                "SwapTotal: 4000000 kB\nSwapFree: 1000000 kB\n"
            },
            "end other programs",
        ),
        (
            "overcommit",
            {
                "proc/sys/vm/overcommit_memory": "2\n",
                "proc/meminfo": "MemAvailable: 9000000 kB\nCommitLimit: 900000 kB\n"
                "Committed_AS: 800000 kB\n",
            },
            "sysctl vm.overcommit_memory=0",
        ),
        ("mappings", {"proc/sys/vm/max_map_count": "1024\n"}, "sysctl vm.max_map_count=65530"),
        ("packets", {"proc/sys/net/core/wmem_max": "4608\n"}, "net.core.wmem_max=212992"),
    ],
)
def test_of_memory(tmp_path: Path, check: str, files: dict[str, str], remedy: str) -> None:
    machine = healthy(tmp_path)
    write(tmp_path, {"sys/fs/cgroup/job/memory.current": "1000\n", **files})
    assert remedy in problem(machine, check).remedy


def test_no_page_map(tmp_path: Path) -> None:
    machine = healthy(tmp_path)
    (tmp_path / "proc/self/pagemap").unlink()
    found = problem(machine, "page-map")
    assert "smddp_sharded" in found.text and 'strategy="smddp"' in found.remedy
