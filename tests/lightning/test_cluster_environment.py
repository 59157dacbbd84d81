"""Ranks of launchers that Lightning does not know, and MPI that is not there."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import pytest

from sdp_plugins.core.topology import Topology
from sdp_plugins.lightning.cluster_environment import for_this_launch
from sdp_plugins.lightning.namespaces import MODULES, strategy_class
from sdp_plugins.lightning.registry import survive_missing_mpi
from tests.lightning import cases
from tests.lightning.models import FABRICS, PACKAGES
from tests.ranks import RankPool

LAUNCHERS = {
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "{rank}",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "hydra": {
        "PMI_RANK": "{rank}",
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": "{rank}",
        "MPI_LOCALNRANKS": "2",
    },
    "slurm": {
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "{rank}",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
    },
    "torchrun": {
        "RANK": "{rank}",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "{rank}",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "{port}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "{port}",
    },
}
ENVIRONMENTS = {
    "openmpi": "TorchElasticEnvironment",
    "hydra": "TorchElasticEnvironment",
    "slurm": "SLURMEnvironment",
    "torchrun": "TorchElasticEnvironment",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", [*PACKAGES, FABRICS[0]])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_a_launcher(
    rank_pool: Callable[[int], RankPool], launcher: str, package: str
) -> None:
    results = rank_pool(2).run(cases.launched, package, LAUNCHERS[launcher])
    for rank, result in enumerate(results):
        assert result["environment"] == ENVIRONMENTS[launcher]
        assert (result["rank"], result["world"]) == (rank, 2)
        assert result["sum"] == 3.0


class Alone:
    """Lightning's own environment in a process that nobody has launched."""

    creates_processes_externally = False


class Chosen(Alone):
    """An environment that knows its launcher."""

    creates_processes_externally = True


def place(source: str, world: int) -> Topology:
    """Rank 1 of a job."""
    return Topology(1 % world, world, 1 % world, world, 0, "key", source)


@pytest.mark.parametrize("kind", [Alone, Chosen])
def test_an_environment_that_fits_is_kept(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    world = 1 if kind is Alone else 2
    monkeypatch.setattr(Topology, "from_env", lambda: place("openmpi", world))
    environment = kind()
    assert for_this_launch(environment, Chosen) is environment
    assert for_this_launch(None, Chosen) is None


@pytest.mark.parametrize(
    ("source", "given", "missing"),
    [
        ("openmpi", {}, "MASTER_ADDR must"),
        ("hydra", {"MASTER_ADDR": "a"}, "MASTER_PORT must"),
        ("hydra", {}, "MASTER_ADDR and MASTER_PORT must"),
    ],
)
def test_mpiruns_nodes_must_know_rank_0(
    monkeypatch: pytest.MonkeyPatch, source: str, given: dict[str, str], missing: str
) -> None:
    monkeypatch.setattr(Topology, "from_env", lambda: Topology(2, 4, 0, 2, 1, "key", source))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{missing} be set. Hint: "):
        for_this_launch(Alone(), Chosen)


@pytest.mark.may_leak("env", reason="Lightning reads the variables until the process ends")
@pytest.mark.parametrize("package", MODULES)
def test_number_of_devices_must_fit(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr(Topology, "from_env", lambda: place("openmpi", 2))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    strategy: Any = strategy_class(package)()
    strategy.cluster_environment = Alone()
    environment = strategy.cluster_environment
    assert (environment.global_rank(), environment.world_size()) == (1, 2)
    environment.validate_settings(2, 1)
    with pytest.raises(ValueError, match=r"does not match the world size \(2\)"):
        environment.validate_settings(4, 1)


@pytest.mark.parametrize("package", ["lightning.pytorch", "lightning_fabric"])
def test_mpi4py_without_mpi(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, package: str
) -> None:
    fabric = {"lightning.pytorch": "lightning.fabric"}.get(package, package)
    mpi: Any = importlib.import_module(f"{fabric}.plugins.environments.mpi").MPIEnvironment
    answer: list[bool | Exception] = [True, RuntimeError("cannot load MPI library"), False]

    def detect() -> bool:
        said = answer.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    monkeypatch.setattr(mpi, "detect", staticmethod(detect))
    survive_missing_mpi(package)
    survive_missing_mpi(package)
    with caplog.at_level(logging.INFO):
        assert [mpi.detect() for _ in range(3)] == [True, False, False]
    assert "cannot load MPI library" in caplog.text
