"""Large blocks of the C library's allocator in memory that the ranks of a node map.

Frameworks that allocate tensors themselves, as JAX and TensorFlow do, get them from the C library,
in memory that peers cannot map. A library that is loaded before it (csrc/preload) allocates blocks
of 1 MiB and more in a file instead, from the moment when a group asks for it; the group's
operations on such tensors copy nothing.
"""

from __future__ import annotations

import ctypes
import logging
import os

from .config import MIB, registers
from .group import Group
from .native_api import all_agree

log = logging.getLogger("sdp_plugins.core")

_UNIT = 2 * MIB


def share_large_blocks(group: Group) -> bool:
    """Have this process allocate large blocks in memory that the group's ranks map; a collective.

    Blocks from before stay where they are. All groups of the process share the memory, and what is
    freed stays with the process. A forked child has a copy, whose pages show what its parent writes
    until the child has written to them.

    Returns:
        Whether all ranks do. A rank does not without the library, which `sdp run` loads; with
        ``SDP_REGISTER=0``; alone on its node; or where the memory cannot be mapped, as with a limit
        on address space, which is logged.
    """
    return all_agree(group, _register(group))


def _register(group: Group) -> bool:
    if group.local_size == 1 or not registers():
        return False
    try:
        open_file = ctypes.CDLL(None).sdp_shared_malloc_open
    except AttributeError:
        return False
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    data, nbytes, fd = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_int()
    wanted = ctypes.c_size_t(memory // group.local_size // _UNIT * _UNIT)
    error = open_file(wanted, ctypes.byref(data), ctypes.byref(nbytes), ctypes.byref(fd))
    if error or data.value is None:
        log.warning(
            "large tensors are copied, as they cannot lie in memory that the ranks share: %s",
            os.strerror(error),
        )
        return False
    group.register(data.value, nbytes.value, fd.value)
    return True
