"""A repair of Lightning's MPI detection, which raises where mpi4py finds no MPI library."""

from __future__ import annotations

import functools
import importlib
import logging

log = logging.getLogger(__name__)


def survive_missing_mpi(package: str) -> None:
    """Let Lightning go on when mpi4py is installed without an MPI library.

    Every Trainer and Fabric asks `MPIEnvironment.detect()` before it looks at its strategy. It is
    meant to answer False where there is no MPI, but expects an ImportError, and mpi4py raises
    RuntimeError: the job dies, whatever its strategy. The class is changed for the whole process,
    as the strategy is not known yet when it is asked; nothing but that one answer changes.
    """
    fabric = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
    module = importlib.import_module(f"{fabric.get(package, package)}.plugins.environments.mpi")
    environment = module.MPIEnvironment
    detect = environment.detect
    if hasattr(detect, "__wrapped__"):
        return

    @functools.wraps(detect)
    def detect_or_go_on() -> bool:
        try:
            return bool(detect())
        except RuntimeError as error:
            log.info("MPI is not used: mpi4py is installed but %s", error)
            return False

    environment.detect = staticmethod(detect_or_go_on)
