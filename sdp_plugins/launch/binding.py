"""The cores that a rank may use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_RANK = b"OMPI_COMM_WORLD_RANK="
_CHOSEN = ("OMPI_MCA_hwloc_base_binding_policy", "PRTE_MCA_hwloc_default_binding_policy")


def undo_one_core_binding(env: Mapping[str, str]) -> bool:
    """Allow the launcher's cores where Open MPI has bound this rank to one; True if that was so.

    Open MPI binds each of up to two ranks to a core if nobody says otherwise. A rank has more
    threads than one: the framework's, the reduction's, the data loader's. Whoever has chosen a
    binding for Open MPI by a variable keeps it, and so does who has bound mpirun itself.
    """
    if any(env.get(name) for name in _CHOSEN) or len(os.sched_getaffinity(0)) > 1:
        return False
    try:
        allowed = os.sched_getaffinity(_launcher())
    except OSError:  # it cannot be seen from here
        return False
    os.sched_setaffinity(0, allowed)
    return len(os.sched_getaffinity(0)) > 1


def _launcher() -> int:
    """The process that has started this rank: the first above it that is not one of the rank.

    Raises:
        OSError: It belongs to somebody else, or is outside of our container.
    """
    process = os.getppid()
    while process and _RANK in Path(f"/proc/{process}/environ").read_bytes():
        status = Path(f"/proc/{process}/stat").read_text(errors="replace")
        process = int(status.rpartition(")")[2].split()[1])  # its parent
    if not process:
        raise ProcessLookupError
    return process
