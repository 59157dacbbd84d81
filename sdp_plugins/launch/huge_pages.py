"""Huge pages for the memory that ranks get from malloc.

Frameworks allocate new memory for the gradients of every step, and the C library returns it to the
kernel afterwards. Each page of 4 KiB then costs a page fault in every step; pages of 2 MiB nearly
remove that cost. They must be requested before a process starts. The C library before glibc 2.35
ignores the request, and so does a kernel that does not allow huge pages.
"""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
_TUNABLE = "glibc.malloc.hugetlb"


def huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable to set for ranks; a value that the user has set is kept (0: no huge pages)."""
    tunables = environment.get(VARIABLE, "")
    if _TUNABLE in tunables:
        return {VARIABLE: tunables}
    return {VARIABLE: ":".join(filter(None, [tunables, f"{_TUNABLE}=1"]))}
