"""The machine, the process's environment and what Python would import, as the checks see them."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path

from sdp_plugins.core.control_groups import cpu_quota
from sdp_plugins.core.environment import environment
from sdp_plugins.core.memory_limits import numbers_in
from sdp_plugins.core.topology import Topology
from sdp_plugins.doctor.addresses import addresses_of
from sdp_plugins.doctor.importing import Imports, import_in_child
from sdp_plugins.launch.rank_count import default_rank_count


def _allowed_cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        text = "the current folder has been deleted. Hint: cd to another one"
        raise FileNotFoundError(text) from None


def _c_library() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):  # another C library
        return ""


@dataclass(frozen=True)
class Machine:
    """The place where a job would run. The defaults are those of this process.

    Attributes:
        root: The folder that contains /proc, /sys and /dev.
        environment: Variables.
        folder: The current folder.
        script: The program that would run; None: any.
        cores: The cores that this process may use.
        given_ranks: Number of ranks on this machine; 0: the launcher's, or `sdp run`'s default.
        hosts: The hosts of the job, if there are several.
        python: The interpreter.
        path: Where installed packages are.
        c_library: Such as ``glibc 2.36``; empty: not glibc.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=environment)
    folder: Path = field(default_factory=_current_folder)
    script: Path | None = None
    cores: frozenset[int] = field(default_factory=_allowed_cores)
    given_ranks: int = 0
    hosts: tuple[str, ...] = ()
    python: Path = Path(sys.executable)
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    c_library: str = field(default_factory=_c_library)

    # ---- files ----

    def text(self, path: str | Path) -> str:
        """The content of a file below the root; empty if it cannot be read."""
        with suppress(OSError):
            return (self.root / path).read_text(errors="replace").strip()
        return ""

    def number(self, path: str) -> int | None:
        """The whole number in a file; None if there is none."""
        text = self.text(path)
        return int(text) if text.lstrip("-").isdecimal() else None

    @cached_property
    def memory(self) -> dict[str, int]:
        """The fields of /proc/meminfo, in bytes."""
        found = numbers_in(self.root / "proc/meminfo")
        return {name.rstrip(":"): 1024 * value for name, value in found.items()}

    # ---- ranks and cores ----

    @cached_property
    def ranks(self) -> int:
        """The number of ranks on this machine."""
        local = self.environment.get("LOCAL_WORLD_SIZE", "")
        return self.given_ranks or (int(local) if local.isdecimal() else 0) or default_rank_count()

    @cached_property
    def place(self) -> Topology | None:
        """This process's place in a job; None if it is no rank, or that cannot be told."""
        with suppress(ValueError):
            found = Topology.from_env(self.environment)
            return None if found.source == "single" else found
        return None

    @property
    def launcher(self) -> str:
        """The launcher that has started this process, if it is not `sdp run`; else empty."""
        by_us = "SDP_JOB_ID" in self.environment
        return "" if self.place is None or by_us else self.place.source

    @cached_property
    def quota(self) -> float:
        """The cores whose time the control groups allow; infinite without a limit."""
        return cpu_quota(self.root)

    @property
    def usable_cores(self) -> int:
        """The cores that threads can use at the same time."""
        return max(1, math.floor(min(len(self.cores), self.quota)))

    @cached_property
    def addresses(self) -> dict[str, str]:
        """What the names of the job's hosts mean here; empty for those that have no address."""
        return addresses_of(self.hosts)

    # ---- Python ----

    @cached_property
    def packages(self) -> dict[str, metadata.Distribution]:
        """The installed packages; of two of one name, Python imports the first."""
        found: dict[str, metadata.Distribution] = {}
        for package in metadata.distributions(path=list(self.path)):
            name = package.metadata["Name"]
            if name:
                found.setdefault(_plain(name), package)
        return found

    def installed(self, *names: str) -> metadata.Distribution | None:
        """The first of these packages that is installed."""
        return next((self.packages[name] for name in names if name in self.packages), None)

    @cached_property
    def imports(self) -> Imports:
        """What a process finds that imports this package and torch."""
        return import_in_child(self.python, self.environment, with_torch="torch" in self.packages)

    @cached_property
    def container(self) -> str:
        """The container that this is; empty if it is none, or not known."""
        if (self.root / "run/.containerenv").exists():
            return "Podman"
        if "KUBERNETES_SERVICE_HOST" in self.environment:
            return "Kubernetes"
        if (self.root / ".dockerenv").exists():
            return "Docker"
        groups = self.text("proc/1/cgroup")
        return "a container" if re.search("docker|lxc|kubepods", groups) else ""


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
