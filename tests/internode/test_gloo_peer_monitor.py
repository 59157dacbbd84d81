"""Over gloo a rank's end is noticed at once, and a leave in good order is none."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from sdp_plugins.core import Group, PeerLostError
from sdp_plugins.core.nodes import Nodes
from sdp_plugins.torch.gloo_network import GlooNetwork
from sdp_plugins.torch.gloo_peer_monitor import elsewhere, monitored_by, send_farewells
from sdp_plugins.torch.store import TorchStore
from tests.internode.spanning import LAYOUTS, LAYOUTS_OF_PLANS, meet, on_node
from tests.ranks import HANG_S, Start, free_port, say

MUCH = 2**23


@pytest.mark.parametrize("layout", LAYOUTS | LAYOUTS_OF_PLANS)
def test_everyone_is_noticed_by_another_node(layout: str) -> None:
    places = (LAYOUTS | LAYOUTS_OF_PLANS)[layout]
    nodes = Nodes.of_places(places, [f"node{place}" for place in places])
    ranks = range(nodes.world_size)
    for rank in ranks:
        assert all(nodes.node_of(peer) != nodes.node_of(rank) for peer in monitored_by(rank, nodes))
    monitored = {rank: monitored_by(rank, nodes) for rank in ranks}
    for members in nodes.members:
        assert any(rank in others for rank in members for others in monitored.values())
    assert [rank for rank in ranks if 0 in monitored[rank]] == elsewhere(0, nodes)


def reduce_for_ever(rank: int, world: int, layout: str, root: str) -> None:
    with meet(layout, root, "g", timeout_s=HANG_S) as group:
        data = np.zeros(MUCH, np.float32)
        group.all_reduce(data)
        say("going")
        while True:
            group.all_reduce(data)


@pytest.mark.parametrize(("layout", "victim"), [("3x1", 2), ("2x2", 3)])
def test_killed_in_the_midst_of_messages(
    start_pooled: Start, tmp_path: Path, layout: str, victim: int
) -> None:
    with start_pooled(len(LAYOUTS[layout]), reduce_for_ever, layout, str(tmp_path)) as ranks:
        assert {rank.heard() for rank in ranks} == {"going"}
        time.sleep(0.2)
        ranks[victim].kill(signal.SIGKILL)
        errors = [rank.outcome().error for rank in ranks if rank.rank != victim]
        assert [type(error) for error in errors] == [PeerLostError] * len(errors), errors
        assert {error.ranks for error in errors} == {(victim,)}, errors


def test_a_node_whose_launcher_ends_its_other_rank(start_pooled: Start, tmp_path: Path) -> None:
    """Which of the two was the first to go is nothing that the other node can know."""
    with start_pooled(4, reduce_for_ever, "2x2", str(tmp_path)) as ranks:
        assert {rank.heard() for rank in ranks} == {"going"}
        ranks[2].kill(signal.SIGSTOP)  # it does not get to say that rank 3 has ended
        ranks[3].kill(signal.SIGKILL)
        ranks[2].kill(signal.SIGKILL)
        errors = [ranks[rank].outcome().error for rank in (0, 1)]
        assert [type(error) for error in errors] == [PeerLostError] * 2, errors
        assert {error.ranks for error in errors} == {(2, 3)}, errors
        assert all("ranks 2, 3 on node1 cannot be reached" in str(error) for error in errors)


def reduce_with_a_store(rank: int, world: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    with (
        on_node(rank),
        Group.from_store(
            TorchStore(store), rank, world, timeout_s=HANG_S, network=GlooNetwork(store)
        ) as group,
    ):
        data = np.zeros(MUCH, np.float32)
        group.all_reduce(data)
        say("going")
        while True:
            group.all_reduce(data)


def test_whoever_has_the_store_is_named_by_all(start_pooled: Start) -> None:
    """None of them can be told anything any more."""
    with start_pooled(4, reduce_with_a_store, free_port()) as ranks:
        assert {rank.heard() for rank in ranks} == {"going"}
        time.sleep(0.2)
        ranks[0].kill(signal.SIGKILL)
        errors = [rank.outcome().error for rank in ranks if rank.rank]
        assert [type(error) for error in errors] == [PeerLostError] * 3, errors
        assert {error.ranks for error in errors} == {(0,)}, errors


def leave_early(rank: int, world: int, root: str, leaver: int) -> float:
    group = meet("3x1", root, "g")
    first, last = (other for other in range(world) if other != leaver)
    data = np.full(5, float(rank))
    group.barrier()
    if rank == first:
        time.sleep(1)  # the one that waits sees that another one leaves meanwhile
        group.send(data, last)
    elif rank == last:
        group.recv(data, first)
    group.close()
    return float(data[0])


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_rank_that_leaves_is_not_missed(start_pooled: Start, tmp_path: Path, leaver: int) -> None:
    with start_pooled(3, leave_early, str(tmp_path), leaver) as ranks:
        first, last = (rank for rank in range(3) if rank != leaver)
        assert ranks.results()[last] == first


def test_a_farewell_reaches_those_who_stay() -> None:
    """Whoever has left before cannot be told, and need not be."""
    word = mock.Mock()
    group = mock.Mock()
    group.send = mock.Mock(side_effect=[RuntimeError("closed"), word])
    send_farewells(group, [1, 2], 5)
    assert [call.args[1:] for call in group.send.call_args_list] == [(1, 5), (2, 5)]
    word.wait.assert_called_once()
