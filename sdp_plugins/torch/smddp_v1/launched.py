"""Joining the ranks of this job, under any launcher."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, TCPStore

from sdp_plugins.core.config import Config
from sdp_plugins.core.environment import environment
from sdp_plugins.core.internode.choice import for_environment
from sdp_plugins.core.local_address import local_address
from sdp_plugins.core.topology import Topology
from sdp_plugins.torch.backend_name import BACKEND

TORCHS_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join(**options: Any) -> None:
    """Create the default process group of all ranks.

    torch reads torchrun's variables. Ranks that have only the variables of mpirun or srun meet at a
    store on rank 0, whose address rank 0 sends to all.

    Args:
        **options: Further keyword arguments of init_process_group().
    """
    given = environment()
    if all(given.get(name) for name in TORCHS_VARIABLES):
        dist.init_process_group(BACKEND, **options)
        return
    topology = Topology.from_env(given)
    config = Config.from_env(given)
    store = _store(topology, config)
    where: dict[str, Any] = {"rank": topology.rank, "world_size": topology.world_size}
    dist.init_process_group(BACKEND, store=store, **where, **options)


def _store(topology: Topology, config: Config) -> Any:
    timeout = timedelta(seconds=config.wait_s)
    if topology.world_size == 1:
        return HashStore()
    exchange, _ = for_environment(topology, "torch's store", config)
    if topology.rank == 0:
        try:
            address = own_address() if topology.local_size < topology.world_size else "127.0.0.1"
        except OSError:
            exchange(b"", config.wait_s)  # otherwise the other ranks would wait
            raise no_address() from None
        store = TCPStore(address, 0, topology.world_size, True, timeout, wait_for_workers=False)
        exchange(f"{address} {store.port}".encode(), config.wait_s)
        return store
    found = exchange(b"", config.wait_s)[0].decode()
    if not found:
        raise no_address()
    address, port = found.split()
    return TCPStore(address, int(port), topology.world_size, False, timeout)


def no_address() -> RuntimeError:
    """Return the error that all ranks raise if rank 0's host has no route to other nodes."""
    return RuntimeError(
        "rank 0's host has no address for the other nodes: its name is the loopback's, and it has "
        "no route to elsewhere. Hint: give all ranks MASTER_ADDR and MASTER_PORT."
    )


def own_address() -> str:
    """Return this host's address as other nodes see it: its name's, unless that is the loopback.

    Raises:
        OSError: The host has no route to other nodes.
    """
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        found = "127.0.1.1"
    if not found.startswith("127."):
        return found
    return local_address("192.0.2.1")  # reserved for documentation: any route out will do
