"""torch's gloo as the network between nodes, for jobs without MPI."""

from __future__ import annotations

import ipaddress
import secrets
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from sdp_plugins.core import RendezvousError
from sdp_plugins.core.addresses_and_ports import local_address
from sdp_plugins.core.environment import environment
from sdp_plugins.core.nodes import Nodes
from sdp_plugins.core.rank_names import RankNames
from sdp_plugins.core.rendezvous import Exchange
from sdp_plugins.torch.gloo_channel import Connections, GlooChannel
from sdp_plugins.torch.gloo_failure_store import FailureStore
from sdp_plugins.torch.gloo_peer_monitor import first_line

ProcessGroupGloo: Any = dist.ProcessGroupGloo  # torch's stubs describe little of it


class GlooNetwork:
    """Opens channels over gloo; the store is a key space of this group only."""

    name = "gloo"

    def __init__(self, store: Store) -> None:
        self._store = store

    def open(
        self, rank: int, nodes: Nodes, exchange: Exchange, name: str, timeout_s: float
    ) -> GlooChannel:
        """Connect with all ranks."""
        # Groups that are created at the same time need different keys.
        key = exchange(secrets.token_bytes(8), timeout_s)[0].hex()
        store = PrefixStore(f"gloo/{key}", self._store)
        limit = timedelta(seconds=timeout_s)
        try:
            address = address_towards_master()
            if address is None:  # torch's default: GLOO_SOCKET_IFNAME or the host's name
                group = ProcessGroupGloo(store, rank, nodes.world_size, limit)
            else:
                options = ProcessGroupGloo._Options()
                options._timeout = limit
                options._devices = [ProcessGroupGloo.create_device(hostname=address)]
                group = ProcessGroupGloo(store, rank, nodes.world_size, options)
        except RuntimeError as error:
            prefix = RankNames(name, nodes.world_size, nodes.global_ranks).error_prefix(rank)
            raise RendezvousError(
                f"{prefix}rendezvous: gloo cannot connect the nodes ({first_line(error)}). Hint: "
                "check whether a rank has ended; if none has, set GLOO_SOCKET_IFNAME to the "
                "network interface between the nodes."
            ) from error
        return GlooChannel(Connections(group, nodes), FailureStore(store))


def address_towards_master() -> str | None:
    """Return this host's address on the route to MASTER_ADDR, if no interface is configured.

    A host's name often resolves to its loopback address, which other nodes cannot reach.
    """
    if environment().get("GLOO_SOCKET_IFNAME"):
        return None
    address = address_on_route_to_master()
    return None if address is None or ipaddress.ip_address(address).is_loopback else address


def address_on_route_to_master() -> str | None:
    """Return this host's address on the route to MASTER_ADDR; None if that is not set or known."""
    master = environment().get("MASTER_ADDR", "")
    try:
        return local_address(master) if master else None
    except OSError:
        return None
