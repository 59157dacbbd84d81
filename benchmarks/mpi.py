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
    """An mpiexec and the library that belongs to it."""

    flavour: str
    mpiexec: Path
    libmpi: Path | None

    def command(
        self,
        ranks: Sequence[Sequence[str]],
        options: Sequence[str] = (),
        hosts: Sequence[str] = (),
    ) -> list[str]:
        """One job whose ranks run different command lines; rank 0's comes first.

        Args:
            ranks: Their command lines.
            options: Of mpiexec.
            hosts: Where each rank runs; empty: here.
        """
        line = [str(self.mpiexec), *options]
        for rank, arguments in enumerate(ranks):
            line += [":"] if rank else []
            line += ["-n", "1", *(("-host", hosts[rank]) if hosts else ()), *arguments]
        return line

    def environment(self) -> dict[str, str]:
        """What mpi4py and this MPI need to see."""
        env = {"MPI4PY_LIBMPI": str(self.libmpi)} if self.libmpi else {}
        if self.flavour == "openmpi":
            # More ranks than cores is something we measure, not a mistake.
            env["OMPI_MCA_rmaps_base_oversubscribe"] = "1"  # release 4
            env["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"  # release 5
            if os.geteuid() == 0:
                env["OMPI_ALLOW_RUN_AS_ROOT"] = env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        return env


def discover(prefixes: Sequence[Path] = ()) -> list[MpiInstall]:
    """MPI installations that mpi4py can use, those under `prefixes` first.

    Looked for besides: this Python's prefix (where MPI wheels put themselves) and the PATH.
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
    """The libmpi beside this mpiexec; None leaves it to the dynamic loader."""
    names = ("libmpi.so.40", "libmpi.so.12", "libmpi.so")
    return next((folder / name for name in names if (folder / name).exists()), None)
