"""Recognizes ranks that mpirun started.

Lightning detects mpirun only by mpi4py. Without mpi4py, or with one made for another MPI, each of
the N processes would start N - 1 more.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

from sdp_plugins.core.config import Config
from sdp_plugins.core.local_address import LOOPBACK, free_port
from sdp_plugins.core.rendezvous import EnvExchange
from sdp_plugins.core.topology import Topology


def for_this_launch(environment: Any) -> Any:
    """`environment`, or one for the launcher that has started this process already.

    Args:
        environment: A ClusterEnvironment that Lightning or the user chose, or None.
    """
    if environment is None or environment.creates_processes_externally:
        return environment
    topology = Topology.from_env()
    if topology.world_size == 1:
        return environment
    return LaunchedEnvironment(topology)


class LaunchedEnvironment:
    """The ClusterEnvironment of every Lightning package, which need not be a subclass.

    Its values come from the launcher's variables.
    """

    creates_processes_externally = True

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    @cached_property
    def _main(self) -> tuple[str, int]:
        """Rank 0's address and a free port there, agreed on by all ranks at the first access."""
        if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
            return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        port = str(free_port()).encode()
        ports = EnvExchange(self._topology, "lightning")(port, Config.from_env().wait_s)
        return LOOPBACK, int(ports[0])

    @property
    def main_address(self) -> str:
        """The address of rank 0's store."""
        return self._main[0]

    @property
    def main_port(self) -> int:
        """The port of rank 0's store."""
        return self._main[1]

    def world_size(self) -> int:
        """The number of ranks."""
        return self._topology.world_size

    def global_rank(self) -> int:
        """This process's rank."""
        return self._topology.rank

    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self._topology.local_rank

    def node_rank(self) -> int:
        """The node's number."""
        return self._topology.node_rank

    def set_world_size(self, size: int) -> None:
        """Ignored: the launcher sets it."""

    def set_global_rank(self, rank: int) -> None:
        """Ignored: the launcher sets it."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse a Trainer that asks for another number of ranks than were started."""
        if num_devices * num_nodes != self.world_size():
            raise ValueError(
                f"the launcher ({self._topology.source}) started {self.world_size()} ranks, but "
                f"devices={num_devices} and num_nodes={num_nodes} ask for "
                f"{num_devices * num_nodes}. Hint: set devices={self._topology.local_size}."
            )

    def teardown(self) -> None:
        """Do nothing: there is nothing to restore."""
