"""The interpreter."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from sdp_plugins.doctor.finding import Finding, error, ok, skipped, warning
from sdp_plugins.doctor.machine import Machine

_HEAD = 4096  # contains the name of the dynamic linker


def interpreter(machine: Machine) -> Iterator[Finding]:
    """Python is a 64-bit program of glibc."""
    try:
        with open(machine.python, "rb") as program:
            head = program.read(_HEAD)
    except OSError as failed:
        yield skipped(f"{machine.python} cannot be read ({failed.strerror})")
        return
    if head[:4] != b"\x7fELF":
        yield skipped(f"{machine.python} is a script")
    elif head[4] != 2:
        yield error(
            f"{machine.python} is a 32-bit program, and shared buckets soon fill its addresses",
            "install a 64-bit Python",
        )
    elif b"/ld-musl" in head:
        yield warning(
            f"{machine.python} uses musl, for which PyTorch, TensorFlow and JAX have no wheels",
            "use an image with glibc, such as python:3.12-slim instead of python:3.12-alpine",
            slows=True,
        )
    else:
        yield ok(f"{machine.python} is a 64-bit program of glibc")


def python_version(machine: Machine) -> Iterator[Finding]:
    """This version of Python is one that the package supports."""
    from packaging.specifiers import SpecifierSet

    package = machine.installed("sdp-plugins")
    allowed = (package.metadata["Requires-Python"] if package else "") or ""
    version = platform.python_version()
    if not allowed:
        yield skipped("the metadata of sdp-plugins does not say which Python it needs")
    elif SpecifierSet(allowed).contains(version, prereleases=True):
        yield ok(f"Python {version} is {allowed}")
    else:
        yield error(
            f"Python is {version}, and sdp-plugins needs {allowed}",
            f"make a virtual environment with Python {allowed}",
        )
