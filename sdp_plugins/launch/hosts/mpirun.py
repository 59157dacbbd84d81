"""mpirun: finds the one that starts a job, checks that the ranks load its MPI, and calls it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sdp_plugins.launch.answers import answer_of
from sdp_plugins.launch.hosts import LaunchError

ASK_S = 30.0
OPEN_MPI, MPICH, INTEL_MPI = "Open MPI", "MPICH", "Intel MPI"
# Patterns for `mpirun --version` and MPI_Get_library_version.
_FAMILIES = {
    OPEN_MPI: re.compile(r"Open ?MPI\)?,? v?([\d.]+)|\(Open MPI\) ([\d.]+)", re.IGNORECASE),
    INTEL_MPI: re.compile(r"Intel\(R\) MPI Library.*?Version ([\d.]+)", re.DOTALL),
    MPICH: re.compile(
        r"HYDRA build details.*?Version:\s*([\w.]+)|MPICH Version:\s*([\w.]+)", re.DOTALL
    ),
}
_ASK_LIBRARY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""
INSTALL = "pip install mpi4py mpich, or apt-get install openmpi-bin"


@dataclass(frozen=True)
class Mpirun:
    """An mpirun.

    Attributes:
        path: Absolute path.
        family: The MPI to which it belongs.
        version: Version of that MPI.
    """

    path: Path
    family: str
    version: str

    def __str__(self) -> str:
        return f"{self.path} ({self.family} {self.version})"

    @property
    def is_open_mpi(self) -> bool:
        """Whether it belongs to Open MPI, and else to one that uses hydra."""
        return self.family == OPEN_MPI

    @property
    def major(self) -> int:
        """The major version."""
        found = re.match(r"\d+", self.version)
        return int(found.group()) if found else 0


def family_of(text: str) -> tuple[str, str] | None:
    """The MPI and version that a text names; None if it names none."""
    for family, pattern in _FAMILIES.items():
        if found := pattern.search(text):
            return family, next(group for group in found.groups() if group)
    return None


def identified(path: Path, environment: Mapping[str, str]) -> Mpirun:
    """Find out the MPI of an mpirun.

    Raises:
        LaunchError: It does not run, or belongs to no known MPI.
    """
    try:
        answer = answer_of([path, "--version"], environment, ASK_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"{path} does not run ({error}). Hint: choose another with --mpirun; {INSTALL}."
        ) from None
    found = family_of(answer.stdout + answer.stderr)
    if found is None:
        raise LaunchError(
            f"`{path} --version` names neither Open MPI nor MPICH nor Intel MPI. Hint: choose "
            f"another with --mpirun; {INSTALL}."
        )
    return Mpirun(path, *found)


def candidates(environment: Mapping[str, str]) -> list[Path]:
    """The mpirun in PATH and the one beside this Python, where MPI's wheels put it."""
    found = [shutil.which("mpirun", path=environment.get("PATH", os.defpath))]
    found.append(shutil.which("mpirun", path=str(Path(sys.executable).parent)))
    paths = [Path(path).absolute() for path in found if path]
    return list({path.resolve(): path for path in reversed(paths)}.values())[::-1]


def library(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The MPI that mpi4py loads in the ranks, and its version; None without mpi4py."""
    try:
        asked = answer_of([sys.executable, "-c", _ASK_LIBRARY], environment, ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return family_of(asked.stdout) if asked.returncode == 0 else None


def find(chosen: str | None, environment: Mapping[str, str]) -> Mpirun:
    """The mpirun to use: the user's choice, or the only one in PATH and beside this Python.

    Raises:
        LaunchError: There is none, there are two, or it does not belong to the ranks' MPI.
    """
    loaded = library(environment)
    if chosen is not None:
        path = shutil.which(chosen, path=environment.get("PATH", os.defpath))
        if path is None:
            raise LaunchError(
                f"there is no program {chosen!r}. Hint: --mpirun takes the path of an mpirun."
            )
        found = [identified(Path(path).absolute(), environment)]
    else:
        found = [identified(path, environment) for path in candidates(environment)]
    if not found:
        raise LaunchError(
            "--hosts needs an mpirun, but there is none in PATH or beside this Python. "
            f"Hint: {INSTALL} (on every host)."
        )
    check_one(found, loaded)
    check_library(found[0], loaded)
    return found[0]


def check_one(found: list[Mpirun], loaded: tuple[str, str] | None) -> None:
    """Refuse to choose between two MPIs."""
    if len({(mpirun.family, mpirun.version) for mpirun in found}) < 2:
        return
    fitting = [m for m in found if loaded and m.family == loaded[0]]
    why = f"; mpi4py loads {loaded[0]} {loaded[1]}" if loaded else ""
    advice = f"--mpirun {(fitting or found)[0].path}" + ("" if fitting else ", or the other")
    raise LaunchError(
        f"two MPIs: {found[0]} in PATH and {found[1]} beside this Python{why}. Hint: choose one: "
        f"{advice}."
    )


def check_library(mpirun: Mpirun, loaded: tuple[str, str] | None) -> None:
    """Refuse an mpirun whose ranks would load another MPI.

    MPICH and Intel MPI can start each other's ranks.
    """
    if loaded is None or (mpirun.family == OPEN_MPI) == (loaded[0] == OPEN_MPI):
        return
    raise LaunchError(
        f"two MPIs: {mpirun} would start ranks whose mpi4py loads {loaded[0]} {loaded[1]}. Hint: "
        f"use the mpirun of {loaded[0]} (--mpirun PATH), or point MPI4PY_LIBMPI to the library of "
        f"{mpirun.family}."
    )


def mpirun_line(
    mpirun: Mpirun, places: Mapping[str, int], names: Sequence[str], command: Sequence[str]
) -> list[str]:
    """The command line that starts `command` once per rank, one host after the other.

    It forwards the variables `names`.
    """
    hosts = ",".join(f"{host}:{slots}" for host, slots in places.items())
    line = [str(mpirun.path)]
    if mpirun.family == INTEL_MPI:  # its -hosts takes no numbers
        return [*line, *_hydra(names), *_in_parts(places, command, lambda host, slots: host)]
    if mpirun.family == MPICH:
        return [*line, *_hydra(names), "-hosts", hosts, "-n", str(sum(places.values())), *command]
    if mpirun.major < 5:  # it would put this host first, whatever its place
        described = [*_exported(names), *command]  # its -x applies to one part of the line
        parts = _in_parts(places, described, lambda host, slots: f"{host}:{slots}")
        return [*line, *_open_mpi(), *parts]
    ranks = ["-n", str(sum(places.values()))]
    return [*line, *_open_mpi(), *_exported(names), "--host", hosts, *ranks, *command]


def _open_mpi() -> list[str]:
    """Options of Open MPI; --bind-to none, because ranks have several threads."""
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [*root, "--map-by", "slot", "--bind-to", "none"]


def _exported(names: Sequence[str]) -> list[str]:
    return [part for name in names for part in ("-x", name)]


def _hydra(names: Sequence[str]) -> list[str]:
    """Options of hydra, which would forward the whole environment without a list."""
    return ["-genvlist", ",".join(names)]


def _in_parts(
    places: Mapping[str, int], command: Sequence[str], host_option: Callable[[str, int], str]
) -> list[str]:
    """One part of the line per host."""
    line: list[str] = []
    for host, slots in places.items():
        part = ["-n", str(slots), "-host", host_option(host, slots), *command]
        line += [*([":"] if line else []), *part]
    return line
