"""Huge pages for what ranks get from malloc.

Frameworks take fresh memory for the gradients of every step, and the C library gives it back to the
kernel after it: the kernel then hands it out again in pages of 4 KiB, a fault each. With pages of
2 MiB that nearly vanishes; it can only be asked for before a process starts. The C library ignores
what it does not know (before glibc 2.35), and the kernel what it does not allow.
"""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
_TUNABLE = "glibc.malloc.hugetlb"


def huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable to set for ranks; whoever has set the tunable keeps it (0: no huge pages)."""
    tunables = environment.get(VARIABLE, "")
    if _TUNABLE in tunables:
        return {VARIABLE: tunables}
    return {VARIABLE: ":".join(filter(None, [tunables, f"{_TUNABLE}=1"]))}
