"""Finds MPI installations and writes the command lines that start ranks under them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_BANNERS = {"Open MPI": "openmpi", "HYDRA": "mpich", "Intel(R) MPI": "intelmpi"}


@dataclass(frozen=True)
class MpiInstall:
    """An mpiexec and its MPI library."""

    flavour: str
    mpiexec: Path
    libmpi: Path | None

    def command(
        self,
        ranks: Sequence[Sequence[str]],
        options: Sequence[str] = (),
        hosts: Sequence[str] = (),
    ) -> list[str]:
        """Return the command line of one job with one command line per rank, rank 0's first.

        Args:
            ranks: The ranks' command lines.
            options: Options of mpiexec.
            hosts: The host of each rank; empty: this machine.
        """
        line = [str(self.mpiexec), *options]
        for rank, arguments in enumerate(ranks):
            line += [":"] if rank else []
            line += ["-n", "1", *(("-host", hosts[rank]) if hosts else ()), *arguments]
        return line

    def environment(self) -> dict[str, str]:
        """Return the environment variables that mpi4py and this MPI need."""
        env = {"MPI4PY_LIBMPI": str(self.libmpi)} if self.libmpi else {}
        if self.flavour == "openmpi":
            # Some measurements use more ranks than cores on purpose.
            env["OMPI_MCA_rmaps_base_oversubscribe"] = "1"  # Open MPI 4
            env["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"  # Open MPI 5
            if os.geteuid() == 0:
                env["OMPI_ALLOW_RUN_AS_ROOT"] = env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        return env


def discover(prefixes: Sequence[Path] = ()) -> list[MpiInstall]:
    """Return the MPI installations that mpi4py can use, those under `prefixes` first.

    The search includes this Python's prefix (the location of MPI wheels) and the PATH.
    """
    if importlib.util.find_spec("mpi4py") is None:
        return []
    candidates = [prefix / "bin" / "mpiexec" for prefix in (*prefixes, Path(sys.prefix))]
    if on_path := shutil.which("mpiexec"):
        candidates.append(Path(on_path))
    found = [_identify(mpiexec) for mpiexec in dict.fromkeys(candidates) if mpiexec.is_file()]
    return [install for install in found if install is not None]


def _identify(mpiexec: Path) -> MpiInstall | None:
    try:
        answer = subprocess.run(
            [mpiexec, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    for banner, flavour in _BANNERS.items():
        if banner in answer.stdout + answer.stderr:
            return MpiInstall(flavour, mpiexec, _library(mpiexec.parent.parent / "lib"))
    return None


def _library(folder: Path) -> Path | None:
    """Return the libmpi beside this mpiexec; None leaves it to the dynamic loader."""
    names = ("libmpi.so.40", "libmpi.so.12", "libmpi.so")
    return next((folder / name for name in names if (folder / name).exists()), None)
