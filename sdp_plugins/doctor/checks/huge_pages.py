"""Huge pages for malloc, which spare page faults in every step."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sdp_plugins.doctor.finding import Finding, ok, skipped, warning
from sdp_plugins.doctor.machine import Machine
from sdp_plugins.launch.job_environment import TUNABLES, huge_pages

_FIRST_GLIBC = (2, 35)
_ALLOCATOR = re.compile("jemalloc|tcmalloc|mimalloc")


def transparent_huge_pages(machine: Machine) -> Iterator[Finding]:
    """The kernel gives huge pages to who asks for them."""
    text = machine.text("sys/kernel/mm/transparent_hugepage/enabled")
    if not text:
        yield skipped("this kernel has no transparent huge pages")
    elif "[never]" in text:
        yield warning(
            "the kernel gives no huge pages, so each step has tens of thousands of page faults",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
            slows=True,
        )
    else:
        yield ok("the kernel gives huge pages to who asks for them")


def malloc_huge_pages(machine: Machine) -> Iterator[Finding]:
    """The C library asks for huge pages."""
    name, _, version = machine.c_library.partition(" ")
    preloaded = _ALLOCATOR.search(machine.environment.get("LD_PRELOAD", ""))
    if name != "glibc":
        yield skipped("the C library is not glibc")
    elif preloaded:
        yield skipped(f"{preloaded[0]} replaces malloc, and keeps memory by rules of its own")
    elif tuple(map(int, version.split(".")[:2])) < _FIRST_GLIBC:
        yield warning(
            f"malloc of {machine.c_library} asks for no huge pages",
            "use an image with glibc 2.35 or later, such as Debian 12 or Ubuntu 22.04",
            slows=True,
        )
    elif machine.launcher and "hugetlb" not in machine.environment.get(TUNABLES, ""):
        yield warning(
            f"malloc of the ranks asks for no huge pages, as {TUNABLES} does not say so",
            f"export {TUNABLES}={huge_pages({})[TUNABLES]}, and have the launcher pass it on",
            slows=True,
        )
    else:
        yield ok("malloc of the ranks asks for huge pages")
