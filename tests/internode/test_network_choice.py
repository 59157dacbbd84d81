"""What a job's variables tell of the network between its nodes."""

from __future__ import annotations

import warnings

import pytest

from sdp_plugins.core.config import Config
from sdp_plugins.core.internode import mpi_library, network_choice
from sdp_plugins.core.internode.mpi import MpiNetwork
from sdp_plugins.core.topology import Topology

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}


@pytest.mark.parametrize("installed", [True, False])
def test_ranks_of_other_nodes_cannot_come_without_mpi(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    """Else their rank waits for them, and says nothing until its time-out."""
    monkeypatch.setattr(mpi_library, "installed", lambda: installed)
    monkeypatch.setattr(network_choice, "mpi_is_there", lambda: False)
    topology = Topology.from_env(TORCHRUN | {"LOCAL_WORLD_SIZE": "2"})
    with pytest.warns(UserWarning, match=r"rank 3: .* says that 2 of 4 .*Hint: ") as caught:
        _, network = network_choice.for_environment(topology, "g", Config())
    assert network is None
    assert ("mpi4py is not installed" in str(caught[0].message)) != installed


def test_one_node_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_choice, "mpi_is_there", lambda: False)
    topology = Topology.from_env(TORCHRUN | {"LOCAL_WORLD_SIZE": "4"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert network_choice.for_environment(topology, "g", Config())[1] is None


def test_mpirun_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_choice, "mpi_is_there", lambda: True)
    topology = Topology.from_env(HYDRA | {"MPI_LOCALNRANKS": "2"})
    assert isinstance(network_choice.for_environment(topology, "g", Config())[1], MpiNetwork)
    with pytest.raises(ValueError, match="SDP_INTERNODE=gloo"):
        network_choice.for_environment(topology, "g", Config(internode="gloo"))


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("127.0.1.1", False),  # what Debian's /etc/hosts makes of a host's own name
        ("node0", False),
        ("", False),
    ],
)
def test_ranks_that_meet_at_this_machines_own_address_are_all_here(
    monkeypatch: pytest.MonkeyPatch, address: str, here: bool
) -> None:
    """The local SageMaker estimator plays hosts, each with some of the ranks."""
    monkeypatch.setattr(network_choice, "mpi_is_there", lambda: False)
    monkeypatch.setenv("MASTER_ADDR", address)
    topology = Topology.from_env(TORCHRUN | {"LOCAL_WORLD_SIZE": "2"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        network_choice.for_environment(topology, "g", Config())
    assert not caught if here else len(caught) == 1
