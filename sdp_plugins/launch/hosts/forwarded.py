"""The variables that ranks on other hosts get from the launcher's environment.

mpirun's command line has only their names, and mpirun sends the values over its connections:
everybody on a host can read command lines. Other variables are not sent, because an environment may
hold passwords; `-x NAME` adds a variable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sdp_plugins.launch.hosts.launch_error import LaunchError
from sdp_plugins.launch.hosts.messages import TOKEN
from sdp_plugins.launch.job_environment import huge_pages, without_place

NAMES = {
    "PATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "VIRTUAL_ENV",
    "GLIBC_TUNABLES",
    "LANG",
    "TZ",
    TOKEN,
}
PREFIXES = (
    *("SDP_", "PYTHON", "LC_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NUMEXPR_"),  # threads
    *("TORCH", "PYTORCH", "GLOO_", "NCCL_", "KERAS_", "TF_", "XLA_", "JAX_"),
    *("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "MPIR_CVAR_", "MPICH_", "I_MPI_", "MPI4PY_"),
    *("UCX_", "FI_"),
)
# MPICH's mpirun (5.0), given a list of names, loses the last variable of its environment.
_LAST = "SDP_LAUNCH_END"


def environment(
    base: Mapping[str, str], *, token: str, threads: int | None, exported: Sequence[str]
) -> dict[str, str]:
    """The environment of mpirun, and so of the ranks on this machine.

    Args:
        base: This process's environment.
        token: Proves that an agent belongs to this job.
        threads: OMP_NUM_THREADS; None: no change.
        exported: NAME or NAME=VALUE, the user's `-x`.
    """
    kept = without_place(base) | huge_pages(base)
    if threads is not None:
        kept["OMP_NUM_THREADS"] = str(threads)
    for text in exported:
        name, equals, value = text.partition("=")
        if equals:
            kept[name] = value
        elif name not in kept:
            raise LaunchError(f"-x {name}: the variable is not set here. Hint: -x {name}=VALUE.")
    return kept | {TOKEN: token, _LAST: ""}


def names(environment: Mapping[str, str], exported: Sequence[str]) -> list[str]:
    """The names of the variables that mpirun forwards."""
    asked = {text.partition("=")[0] for text in exported}
    chosen = {n for n in environment if n in NAMES or n in asked or n.startswith(PREFIXES)}
    return sorted(chosen - {_LAST})
