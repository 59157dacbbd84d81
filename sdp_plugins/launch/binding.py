"""The cores that a rank may use."""

from __future__ import annotations

import os
from collections.abc import Mapping

_CHOSEN = ("OMPI_MCA_hwloc_base_binding_policy", "PRTE_MCA_hwloc_default_binding_policy")


def undo_one_core_binding(env: Mapping[str, str]) -> bool:
    """Allow all cores where Open MPI has bound this rank to one; True if that was so.

    Open MPI binds each of up to two ranks to a core if nobody says otherwise. A rank has more
    threads than one: the framework's, the reduction's, the data loader's. Whoever has chosen a
    binding for Open MPI by a variable keeps it.
    """
    if any(env.get(name) for name in _CHOSEN):
        return False
    if len(os.sched_getaffinity(0)) > 1 or (os.cpu_count() or 1) == 1:
        return False
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the kernel leaves out what is not ours
    return len(os.sched_getaffinity(0)) > 1
