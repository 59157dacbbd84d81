"""A doctor's report of one host, and of the other hosts of a job; also as JSON."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sdp_plugins import __version__
from sdp_plugins.core.config import JOIN, VARIABLES
from sdp_plugins.core.process_identity import clock_id, namespace
from sdp_plugins.doctor.checks.packages import CHECKED, SAME
from sdp_plugins.doctor.finding import Finding, Status
from sdp_plugins.doctor.machine import Machine
from sdp_plugins.doctor.speed import Case, Speed

SCHEMA = 1
"""Number of the form of the JSON; a change that readers must know increases it."""
# No other variable's value is shown: an environment may hold passwords.
_SHOWN = (
    *(name for name in VARIABLES if name != JOIN),
    *("OMP_NUM_THREADS", "GLIBC_TUNABLES", "LD_PRELOAD", "GLOO_SOCKET_IFNAME", "MASTER_ADDR"),
    *("MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TMPDIR"),
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
)


@dataclass(frozen=True)
class Report:
    """What the doctor knows of a host.

    Attributes:
        host: Its name.
        versions: Of Python and packages.
        machine: Its hardware and system.
        environment: Variables that matter.
        findings: In the order of the checks.
        speed: None: it was not measured.
        verdict: One sentence.
        addresses: What the names of the job's hosts mean here.
        hosts: Reports of the job's other hosts.
    """

    host: str
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    environment: Mapping[str, str]
    findings: Sequence[Finding]
    speed: Speed | None = None
    verdict: str = ""
    addresses: Mapping[str, str] = field(default_factory=dict)
    hosts: Sequence[Report] = ()

    @property
    def exit_code(self) -> int:
        """1 if there is an error, here or on another host."""
        failed = any(finding.status is Status.error for finding in self.findings)
        return int(failed or any(report.exit_code for report in self.hosts))

    def as_json(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Report:
        """Read what `as_json` wrote on another host.

        Raises:
            ValueError, KeyError, TypeError: It is of another version.
        """
        given = dict(found)
        if (schema := given.pop("schema")) != SCHEMA:
            raise ValueError(f"schema {schema} instead of {SCHEMA}")
        given["findings"] = [
            Finding(**{**one, "status": Status(one["status"])}) for one in given["findings"]
        ]
        if speed := given["speed"]:
            cases = [Case(**case) for case in speed["cases"]]
            given["speed"] = Speed(**{**speed, "cases": cases})
        return cls(**{**given, "hosts": ()})


def facts(machine: Machine) -> dict[str, Any]:
    """The fields of a report that no check has."""
    names = (name for checked in CHECKED for name in SAME.get(checked, (checked,)))
    packages = {name: found.version for name in names if (found := machine.installed(name))}
    shown = {name: machine.environment[name] for name in _SHOWN if name in machine.environment}
    return {
        "host": platform.node(),
        "versions": {"python": platform.python_version(), "sdp-plugins": __version__, **packages},
        "machine": described(machine),
        "environment": shown,
        "addresses": machine.addresses,
    }


def described(machine: Machine) -> dict[str, Any]:
    """The hardware and the system."""
    return {
        "time": time.time(),
        "cpu": cpu_model(machine.text("proc/cpuinfo")),
        "cores": len(machine.cores),
        "quota": machine.quota if machine.quota < len(machine.cores) else None,
        "memory": machine.memory.get("MemTotal", 0),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "c_library": machine.c_library,
        "python": str(machine.python),
        "container": machine.container,
        "boot": clock_id(),
        "network": namespace("net"),
        "user": os.geteuid(),
    }


def cpu_model(cpuinfo: str) -> str:
    """The processor's name in /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        if line.startswith(("model name", "CPU part")):
            return line.partition(":")[2].strip()
    return "unknown"
