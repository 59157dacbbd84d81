"""Folders: those from which Python imports first, and those in which something is written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from sdp_plugins.core.native_build import cache_folder, compiler_name
from sdp_plugins.doctor.finding import Finding, error, ok, skipped, warning
from sdp_plugins.doctor.machine import Machine

_MODULES = (
    *("torch", "keras", "tensorflow", "lightning", "pytorch_lightning", "jax", "transformers"),
    *("accelerate", "numpy", "mpi4py", "sdp_plugins"),
)
_COMPILED_FOR = ("tensorflow-cpu", "tensorflow", "jax")


def shadowing_modules(machine: Machine) -> Iterator[Finding]:
    """No file beside the program has the name of a module that it imports."""
    folder = machine.script.resolve().parent if machine.script else machine.folder
    ours = "sdp_plugins", machine.imports.found.get("home")  # a clone, of an editable install
    found = False
    for name in _MODULES:
        spec = PathFinder.find_spec(name, [str(folder)])
        if spec is None or spec.origin is None or (name, str(folder)) == ours:
            continue
        found = True
        yield error(
            f"`import {name}` in a program of {folder} imports {spec.origin}",
            f"rename {Path(spec.origin).relative_to(folder).parts[0]}, or start Python elsewhere",
        )
    if not found:
        yield ok(f"no file in {folder} hides a framework")


def working_folder(machine: Machine) -> Iterator[Finding]:
    """The folder in which the ranks start exists, on this host as on others."""
    if machine.folder.is_dir():
        yield ok(f"ranks start in {machine.folder}")
    else:
        yield error(
            f"there is no folder {machine.folder} here, in which sdp run starts the ranks",
            f"mkdir -p {machine.folder}, or mount it here, too",
        )


def temporary_folder(machine: Machine) -> Iterator[Finding]:
    """TMPDIR can be written: data loaders and Open MPI have their sockets there."""
    given = machine.environment.get("TMPDIR", "")
    folder = Path(given) if given else machine.root / "tmp"
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        yield warning(
            f"the folder for temporary files, {folder}, cannot be written",
            "export TMPDIR=/tmp, or another folder that exists",
        )
    else:
        yield ok(f"{folder} can be written")


def compiled_operations(machine: Machine) -> Iterator[Finding]:
    """Operations for TensorFlow and JAX can be compiled, kept and loaded."""
    if not machine.installed(*_COMPILED_FOR):
        yield skipped("neither TensorFlow nor JAX is installed")
        return
    folder = cache_folder(machine.environment.get("SDP_CACHE"), machine.environment)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    compiler = compiler_name(machine.environment)
    slow = "so TensorFlow's and JAX' tensors are copied by Python functions"
    elsewhere = "export SDP_CACHE=FOLDER, on a file system that allows programs"
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        text = f"the folder for compiled operations, {folder}, cannot be written, {slow}"
        yield warning(text, elsewhere, slows=True)
    elif os.statvfs(there).f_flag & os.ST_NOEXEC:
        text = f"the file system of {folder} allows no programs (noexec), {slow}"
        yield warning(text, elsewhere, slows=True)
    elif not list(folder.glob("*.so")) and not shutil.which(
        compiler, path=machine.environment.get("PATH", os.defpath)
    ):
        text = f"there is no compiler {compiler}, {slow}"
        yield warning(text, "apt-get install g++, or export CXX=COMPILER", slows=True)
    else:
        yield ok(f"operations are compiled by {compiler}, and kept in {folder}")
