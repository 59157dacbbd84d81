"""Large blocks of the C library's allocator in memory that the ranks of a node map.

Frameworks that allocate tensors themselves, as JAX and TensorFlow do, get them from the C library,
in memory that peers cannot map. A library that is loaded before it (csrc/preload) allocates blocks
of 1 MiB and more in a file instead, from the moment when a group asks for it; the group's
operations on such tensors copy nothing.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .config import MIB, registers
from .group import Group
from .native_api import all_agree

log = logging.getLogger("sdp_plugins.core")

LARGE_NBYTES = MIB
"""From this size on, blocks are large; `kLeastBytes` of the library."""
_UNIT = 2 * MIB
_MAPS = Path("/proc/self/maps")
_NO_ACCESS = 0


def share_large_blocks(group: Group, framework: ModuleType) -> bool:
    """Have a framework allocate large blocks in memory that the group's ranks map; a collective.

    Blocks from before stay where they are. All groups of the process share the memory, and what is
    freed stays with the process. A forked child has a copy, whose pages show what its parent writes
    until the child has written to them.

    Args:
        group: The ranks.
        framework: A package; libraries in its folder that are loaded get such blocks, no others.

    Returns:
        Whether all ranks do. A rank does not without the library, which `sdp run` loads; with
        ``SDP_REGISTER=0``; alone on its node; or where all ranks' memory cannot be mapped, as with
        a limit on address space, which is logged.
    """
    file = _file(group, framework)
    if not all_agree(group, file is not None) or file is None:
        return False
    group.register(*file)
    return True


def _file(group: Group, framework: ModuleType) -> tuple[int, int, int] | None:
    """Address, size and descriptor of this process's file; None: it has none that peers can map."""
    if group.local_size == 1 or not registers():
        return None
    if not hasattr(ctypes.CDLL(None), "sdp_shared_malloc_open"):
        return None
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        data, nbytes, fd = opened(memory // group.local_size // _UNIT * _UNIT)
        with mmap.mmap(-1, nbytes * group.local_size, mmap.MAP_PRIVATE, _NO_ACCESS):
            pass  # there is room for the peers' files, and for the check of this one
        for first, last in _code_of(framework):
            _call("serve", ctypes.c_size_t(first), ctypes.c_size_t(last))
    except OSError as error:
        log.warning(
            "%slarge tensors are copied, as they cannot lie in memory that the ranks share: %s. "
            "Hint: raise the limit (ulimit -v for address space, -f for files), or set "
            "SDP_REGISTER=0 to silence this.",
            *(group.error_prefix, error.strerror),
        )
        return None
    return data, nbytes, fd


def opened(nbytes: int) -> tuple[int, int, int]:
    """Open this process's file, of this size, or find it open; its address, size and descriptor.

    Raises:
        OSError: It cannot be opened, or this process was forked from the one that has opened it.
    """
    data, size, fd = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_int()
    found = (ctypes.byref(data), ctypes.byref(size), ctypes.byref(fd))
    _call("open", ctypes.c_size_t(nbytes), *found)
    return data.value or 0, size.value, fd.value


def _call(name: str, *args: Any) -> None:
    if error := getattr(ctypes.CDLL(None), f"sdp_shared_malloc_{name}")(*args):
        raise OSError(error, os.strerror(error))


def _code_of(framework: ModuleType) -> Iterator[tuple[int, int]]:
    """The addresses of the code of a package's libraries."""
    folder = f"{os.path.dirname(os.path.realpath(framework.__file__ or ''))}/"
    for line in _MAPS.read_text().splitlines():
        addresses, permissions, _, _, _, *path = line.split(maxsplit=5)
        if "x" in permissions and path and path[0].startswith(folder):
            first, last = addresses.split("-")
            yield int(first, 16), int(last, 16)
