"""Connecting where the kernel refuses: other networks, other users, too few descriptors."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
from typing import Any

from sdp_plugins.core.config import Config
from sdp_plugins.core.errors import PeerLostError, RendezvousError
from sdp_plugins.core.group_creation import bring_up
from sdp_plugins.core.rank_names import RankNames
from sdp_plugins.core.rendezvous import (
    mesh_peer,
)
from sdp_plugins.core.rendezvous.mesh_connector import MeshConnector
from sdp_plugins.core.rendezvous.messages import (
    send_message,
)
from tests.core.rendezvous_cases import connect_by, env_exchange, error_of, file_exchange, hooked
from tests.faults import NOBODY, needs_root
from tests.ranks import run_ranks, start_ranks

CLONE_NEWNET = 0x40000000


# Out of reach


def meet_from_other_network(rank: int, world: int, root: str, away: int) -> None:
    if rank >= away:
        assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0
    bring_up(rank, RankNames("g", world), file_exchange(root, rank, world), 30, Config())


@needs_root
def test_other_network_namespace(root: str) -> None:
    with start_ranks(3, meet_from_other_network, root, 2) as ranks:
        for rank, there in ((0, (2,)), (1, (2,)), (2, (0, 1))):
            error = error_of(ranks, rank)
            assert type(error) is RendezvousError
            assert error.ranks == there
            host = socket.gethostname()
            assert f"on {host} and this rank on {host} share no memory" in str(error)
            assert "Hint: several nodes need MPI" in str(error)


def connect_as_other_user(rank: int, world: int, root: str) -> None:
    if rank == 1:
        os.setuid(NOBODY)
    connect_by(file_exchange(root, rank, world), rank, world, 5)


@needs_root
def test_other_user(root: str) -> None:
    with start_ranks(2, connect_as_other_user, root) as ranks:
        error = error_of(ranks, 0)
        assert type(error) is RendezvousError
        assert error.ranks == (1,)
        assert f"rank 1 runs as user {NOBODY}, this rank as 0" in str(error)
        error = error_of(ranks, 1)
        assert type(error) is RendezvousError
        assert error.ranks == (0,)


def connect_with_few_descriptors(rank: int, world: int) -> None:
    def limit() -> None:
        if rank == 1:
            os.close(free := os.dup(0))
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + 4, free + 4))

    connect_by(hooked(env_exchange(), limit), rank, world, 10)


def test_too_few_descriptors() -> None:
    """The rank says so; a rank that it cannot even connect to sees it go."""
    with start_ranks(4, connect_with_few_descriptors) as ranks:
        error = error_of(ranks, 1)
        assert type(error) is RendezvousError
        assert "ulimit -n" in str(error)
        for rank in (0, 2, 3):
            error = error_of(ranks, rank)
            assert "ulimit -n" in str(error) or isinstance(error, PeerLostError)
            assert error.ranks == (1,)
            assert "rank 1" in str(error)


def connect_with_little_room_in_flight(rank: int, world: int) -> int:
    """As an ordinary user whose limit of descriptors on their way is reached."""
    full = 0

    def count_full(*args: Any) -> bool:
        nonlocal full
        sent = send_message(*args)
        full += not sent
        return sent

    def connect_before_anyone_receives(self: MeshConnector) -> None:
        connect_all(self)
        MeshConnector._connect_all = connect_all  # type: ignore[method-assign]
        env_exchange("all have called")(b"", 20)

    connect_all = MeshConnector._connect_all
    MeshConnector._connect_all = connect_before_anyone_receives  # type: ignore[method-assign]
    vars(mesh_peer)["send_message"] = count_full
    resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
    os.setuid(NOBODY)
    connect_by(env_exchange(), rank, world, 20)
    return full


@needs_root
def test_kernel_limits_descriptors_in_flight() -> None:
    assert sum(run_ranks(8, connect_with_little_room_in_flight)) > 0
