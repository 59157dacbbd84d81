"""Whether a program that imports torch gets smddp; a child has tried it."""

from __future__ import annotations

from collections.abc import Iterator

from sdp_plugins.core.config import autoload
from sdp_plugins.doctor.checks.packages import REINSTALL
from sdp_plugins.doctor.finding import Finding, error, ok, skipped, warning
from sdp_plugins.doctor.machine import Machine

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def native_module(machine: Machine) -> Iterator[Finding]:
    """The native core loads, and is of this version."""
    imports = machine.imports
    found = imports.found.get("native")
    if found is None:
        yield error(f"the process that imports the native core {imports.failed}", REINSTALL)
    elif "error" in found:
        yield error(f"the native core cannot be imported ({found['error']})", REINSTALL)
    elif found["missing"]:
        yield error(
            f"the native core {found['path']} is of another version: it has no "
            f"{found['missing'][0]}",
            REINSTALL,
        )
    else:
        yield ok(f"the native core loads from {found['path']}")


def torch_backend(machine: Machine) -> Iterator[Finding]:
    """`import torch` registers smddp with torch.distributed."""
    found = machine.imports.found.get("torch")
    if "torch" not in machine.packages:
        yield skipped("torch is not installed")
    elif found is None:
        yield error(
            f"the process that imports torch {machine.imports.failed}",
            f"{machine.python} -X faulthandler -c 'import torch' shows where",
        )
    elif "error" in found:
        yield error(
            f"torch cannot be imported ({found['error']})", "pip install --force-reinstall torch"
        )
    elif found["registered"]:
        yield ok(f"importing torch {found['version']} registers smddp")
    elif found.get("available") is False:
        yield error(
            f"torch {found['version']} was built without torch.distributed",
            "pip install torch, from PyPI or pytorch.org",
        )
    else:
        yield error(*_unregistered(machine, found["reason"]))


def _unregistered(machine: Machine, reason: str) -> tuple[str, str]:
    """Why smddp is not registered, and the remedy."""
    if reason:
        return f"smddp cannot be registered with torch ({reason})", REINSTALL
    if machine.environment.get(_AUTOLOAD) == "0":
        return (
            f"{_AUTOLOAD}=0 keeps torch from loading smddp",
            f"unset {_AUTOLOAD}, or `import sdp_plugins.torch` in the program",
        )
    if not autoload(machine.environment):
        return (
            "SDP_AUTOLOAD is off, so `import torch` does not register smddp",
            "unset SDP_AUTOLOAD, or `import sdp_plugins.torch` in the program",
        )
    return "`import torch` does not register smddp: its entry point is not there", REINSTALL


def smdistributed(machine: Machine) -> Iterator[Finding]:
    """No other package has SMDDP's import names."""
    strangers = machine.imports.found.get("strangers")
    if strangers is None:
        yield skipped(f"the process that looks for it {machine.imports.failed}")
    elif strangers:
        name, file = next(iter(strangers.items()))
        yield warning(
            f"`import {name}` finds {file}, so SMDDP's scripts do not use this package",
            "pip uninstall smdistributed-dataparallel, or delete that file's folder; then install "
            "sdp-plugins-smddp",
        )
    else:
        yield ok("no other package has the names smdistributed.dataparallel and smddpcommon")


def openmp_runtimes(machine: Machine) -> Iterator[Finding]:
    """One OpenMP library runs the threads of a rank."""
    found = machine.imports.found.get("openmp")
    if not found:
        yield skipped("no OpenMP library is loaded")
    elif len(found) > 1:
        yield warning(
            f"NumPy and torch load {len(found)} OpenMP libraries ({', '.join(found)}), each with "
            "threads for all cores of a rank",
            "install NumPy and torch from one source, either pip or conda, and unset LD_PRELOAD",
            slows=True,
        )
    else:
        yield ok(f"the threads of a rank are those of {found[0]}")
