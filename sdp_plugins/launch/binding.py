"""The cores that a rank may use."""

from __future__ import annotations

import os
from collections.abc import Mapping

from sdp_plugins.core.process_identity import launching_process

_CHOSEN = ("OMPI_MCA_hwloc_base_binding_policy", "PRTE_MCA_hwloc_default_binding_policy")


def undo_one_core_binding(env: Mapping[str, str]) -> None:
    """Allow all cores of mpirun if Open MPI has bound this rank to one core.

    By default Open MPI binds each of up to two ranks to a core. But a rank has several threads: of
    the framework, the reduction, the data loader. A binding that the user has chosen, by a variable
    of Open MPI or by binding mpirun itself, is kept.
    """
    if any(env.get(name) for name in _CHOSEN) or len(os.sched_getaffinity(0)) > 1:
        return
    try:
        allowed = os.sched_getaffinity(launching_process("OMPI_COMM_WORLD_RANK"))
    except OSError:  # mpirun has ended, or is in another pid namespace
        return
    os.sched_setaffinity(0, allowed)
