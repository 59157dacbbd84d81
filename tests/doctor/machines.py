"""Machines to examine: one that a folder of files describes, and this one with a fault."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdp_plugins.doctor.all_checks import run_checks
from sdp_plugins.doctor.finding import Finding, Status
from sdp_plugins.doctor.importing import Imports
from sdp_plugins.doctor.machine import Machine
from tests.leaks import CLONE_NEWNS, MS_PRIVATE, MS_REC
from tests.ranks import HANG_S

DOCTOR = [sys.executable, "-m", "sdp_plugins.doctor"]
MS_NOEXEC = 8
_UNSHARE = ["unshare", "--mount", "--net", "true"]
needs_namespaces = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(_UNSHARE, capture_output=True).returncode > 0,
    reason="mounts a file system, or makes a network: needs root",
)
Done = subprocess.CompletedProcess[str]

AVX2 = "fpu sse2 avx avx2 f16c"
FILES = {
    "proc/cpuinfo": f"processor\t: 0\nmodel name\t: A Processor\nflags\t\t: {AVX2}\n",
    "proc/loadavg": "0.50 0.40 0.30 1/200 4242\n",
    "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 12000000 kB\nSwapTotal: 0 kB\n"
    "SwapFree: 0 kB\nCommitLimit: 8000000 kB\nCommitted_AS: 1000000 kB\n",
    "proc/mounts": "tmpfs /dev/shm tmpfs rw 0 0\n",
    "proc/self/cgroup": "0::/job\n",
    "proc/self/pagemap": "\n",
    "proc/self/status": "Name:\tpython\nMems_allowed_list:\t0\n",
    "proc/sys/net/core/wmem_max": "212992\n",
    "proc/sys/vm/max_map_count": "65530\n",
    "proc/sys/vm/overcommit_memory": "0\n",
    "sys/devices/system/cpu/online": "0-3\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "schedutil\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq\n",
    "sys/devices/system/node/node0/cpulist": "0-3\n",
    "sys/fs/cgroup/job/cpu.max": "max 100000\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/class/net/eth0/operstate": "up\n",
    "tmp/.keep": "",
    "dev/shm/.keep": "",
    "work/.keep": "",
    "bin/python": "",
    "bin/g++": "",
}
IMPORTED = {
    "home": "/site",
    "strangers": {},
    "numpy": "2.0.0",
    "native": {"path": "/site/_native.so", "missing": []},
    "torch": {"version": "2.13.0", "registered": True, "reason": ""},
    "openmp": ["/site/torch/lib/libgomp.so.1"],
}
REQUIRED = {
    "torch": ">=2.13,<2.16",
    "numpy": ">=1.24,<3",
    "tensorflow-cpu": ">=2.18,<2.22",
    "mpi4py": ">=4.0",
}


def write(folder: Path, files: Mapping[str, str]) -> Path:
    """Write files below a folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def install(folder: Path, name: str, version: str, *lines: str, entry_points: str = "") -> None:
    """Write the metadata of a package, as pip does."""
    metadata = "\n".join([f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *lines, ""])
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    write(folder, {f"{info}/METADATA": metadata, f"{info}/entry_points.txt": entry_points})


def install_ourselves(folder: Path, version: str, entry_points: bool = True) -> None:
    """Write the metadata of this package with the extras `REQUIRED`."""
    extras = {name: f'; extra == "{name}"' for name in REQUIRED if name != "numpy"}
    lines = [f"Requires-Dist: {n}{r}{extras.get(n, '')}" for n, r in REQUIRED.items()]
    groups = ("torch.backends", "torch.distributed.backends")
    text = "\n".join(f"[{g}]\nsdp_plugins = sdp_plugins._activate:activate\n" for g in groups)
    install(
        folder,
        "sdp-plugins",
        version,
        *("Requires-Python: >=3.10", *lines),
        entry_points=text if entry_points else "",
    )


def healthy(folder: Path) -> Machine:
    """A machine with four cores and two ranks, on which all is well."""
    from sdp_plugins import __version__

    write(folder, FILES)
    (folder / "bin/python").write_bytes(b"\x7fELF\x02\x01\x01" + bytes(100) + b"/ld-linux.so.2")
    (folder / "bin/g++").chmod(0o755)
    install_ourselves(folder / "site", __version__)
    install(folder / "site", "torch", "2.13.0")
    install(folder / "site", "numpy", "2.0.0")
    machine = Machine(
        root=folder,
        environment={"PATH": str(folder / "bin"), "XDG_CACHE_HOME": str(folder / "cache")},
        folder=folder / "work",
        cores=frozenset(range(4)),
        given_ranks=2,
        python=folder / "bin/python",
        path=(str(folder / "site"),),
        c_library="glibc 2.36",
    )
    return importing(machine)


def importing(machine: Machine, failed: str = "", **found: Any) -> Machine:
    """The machine, where a program that imports this package finds something else."""
    known = {} if failed else {**IMPORTED, **found}
    vars(machine)["imports"] = Imports(known, failed)  # as the cached property would keep it
    return machine


def with_variables(machine: Machine, **variables: str) -> Machine:
    """The machine with more variables."""
    return changed(machine, environment={**machine.environment, **variables})


def changed(machine: Machine, **fields: Any) -> Machine:
    """The machine with other fields, and with what its imports have found."""
    other = replace(machine, **fields)
    vars(other)["imports"] = machine.imports
    return other


def findings(machine: Machine, check: str) -> list[Finding]:
    """What a check finds."""
    found = list(run_checks(machine, [check]))
    assert found, check
    assert not any("the check failed itself" in finding.text for finding in found), found
    return found


def problem(machine: Machine, check: str) -> Finding:
    """The only problem that a check finds."""
    (found,) = (finding for finding in findings(machine, check) if finding.is_problem)
    assert found.check == check and found.remedy
    return found


def doctor(
    *arguments: str, setup: Callable[[], object] | None = None, cwd: Path | None = None, **env: str
) -> Done:
    """`sdp doctor` in a process with other limits, in another folder, or with more variables."""
    return subprocess.run(
        [*DOCTOR, *arguments],
        env={**os.environ, **env},
        cwd=cwd,
        preexec_fn=setup,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def real_problem(
    check: str, setup: Callable[[], object] | None = None, cwd: Path | None = None, **env: str
) -> dict[str, Any]:
    """The only problem that a check finds in such a process."""
    done = doctor("--json", "-n", "2", "--check", check, setup=setup, cwd=cwd, **env)
    found = json.loads(done.stdout)["findings"]
    (only,) = (one for one in found if one["status"] in ("error", "warning"))
    assert only["check"] == check and only["remedy"]
    assert done.returncode == (only["status"] == Status.error.value), done.stderr
    return dict(only)


def own_shared_memory(options: bytes, flags: int = 0) -> None:
    """Give this process a /dev/shm of its own, as a container does."""
    libc = ctypes.CDLL(None, use_errno=True)
    steps = (
        lambda: libc.unshare(CLONE_NEWNS),
        lambda: libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None),
        lambda: libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", flags, options),
    )
    for step in steps:
        if step() != 0:
            raise OSError(ctypes.get_errno(), "mount")
