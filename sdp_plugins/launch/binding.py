"""The cores that a rank may use."""

from __future__ import annotations

import os
from collections.abc import Mapping

from sdp_plugins.core.process_identity import launching_process

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
        allowed = os.sched_getaffinity(launching_process("OMPI_COMM_WORLD_RANK"))
    except OSError:  # it is gone, or cannot be seen from here
        return False
    os.sched_setaffinity(0, allowed)
    return len(os.sched_getaffinity(0)) > 1
