"""Fixes Lightning's MPI detection, which raises if mpi4py finds no MPI library."""

from __future__ import annotations

import functools
import importlib
import logging

log = logging.getLogger(__name__)


def survive_missing_mpi(package: str) -> None:
    """Let Lightning continue when mpi4py is installed without an MPI library.

    Every Trainer and Fabric calls `MPIEnvironment.detect()` before it reads its strategy. The call
    should return False without MPI, but it expects an ImportError where mpi4py raises RuntimeError,
    so the job ends, whatever its strategy. The class is patched for the whole process, because the
    strategy is not known at the call; only this result changes.
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
            log.info("MPI is not used: mpi4py is installed, but %s", error)
            return False

    environment.detect = staticmethod(detect_or_go_on)
