"""The baselines for our all_reduce on simulated nodes: a ring, and servers of whole tensors.

Both baselines are favoured: neither pays for messages (``Costs.message_s``) or for reducing
(``Costs.node_byte_s``), as our all_reduce does.
"""

from __future__ import annotations

import numpy as np

from benchmarks.predict.exchange import Times
from sdp_plugins.core.internode.cost_model import Costs
from sdp_plugins.core.internode.plan import Algorithm, Plan


class Ring:
    """One flat ring over all ranks, with the ranks of a node next to each other.

    With N ranks and S bytes: 2(N-1) sequential hops, and 2S(N-1)/N bytes over every link. The ring
    crosses each node's link once per direction, whatever the number of its ranks. A bucket starts
    when the previous one has ended. The part that the slowest rank adds last still has all hops to
    go, so every rank ends all hops after the slowest has started.

    Args:
        costs: The costs of the network.
        nodes: Number of nodes.
        ranks_per_node: Number of ranks per node.
        local_s: Seconds of a hop between ranks of one node; None: as between nodes.
    """

    def __init__(
        self, costs: Costs, nodes: int, ranks_per_node: int, local_s: float | None = None
    ) -> None:
        self._costs = costs
        self._nodes = nodes
        self._ranks = nodes * ranks_per_node
        self._local_s = costs.latency_s if local_s is None else local_s
        self._free_s = 0.0

    def seconds(self, nbytes: int) -> float:
        """Return the seconds for one bucket once all ranks have it."""
        # A rank sends as much as a node would in a direct exchange with the same number of members.
        sent = Plan(Algorithm.sharded, (self._ranks,)).sent(nbytes)
        local = (self._ranks - 1) * (self._ranks - self._nodes) / self._ranks
        hops_s = local * self._local_s + (self._ranks - 1 - local) * self._costs.latency_s
        return 2 * hops_s + sent * self._costs.byte_s

    def all_reduce(self, ready: Times, nbytes: int) -> Times:
        """Return when every node has the sum of the next bucket."""
        self._free_s = max(self._free_s, float(ready.max())) + self.seconds(nbytes)
        return np.full(self._nodes, self._free_s)


class Servers:
    """Parameter servers, one per node; each tensor has one server.

    A tensor goes to the server with the fewest bytes so far. With M nodes and S bytes, B of them on
    the busiest server: 2 hops, and in each direction of its node's link (M-1)B bytes as a server
    and S - B as a worker. If all tensors were split evenly (B = S/M), these would be the 2S(M-1)/M
    of a sharded reduction.

    Replies share no direction of the link with requests and do not wait for them either: one
    tensor's reply overlaps another's request. This favours servers over practice, where the last
    tensor's reply has nothing to overlap with.

    Args:
        costs: The costs of the network.
        nodes: Number of nodes.
    """

    def __init__(self, costs: Costs, nodes: int) -> None:
        self._costs = costs
        self._free = np.zeros(nodes)
        self._served = np.zeros(nodes)

    @property
    def imbalance(self) -> float:
        """The bytes of the busiest server over the mean of all servers."""
        return float(self._served.max() / self._served.mean())

    def all_reduce(self, ready: Times, nbytes: int) -> Times:
        """Return when every node has the sums of this tensor and of all previous ones."""
        nodes, server = len(self._served), int(self._served.argmin())
        self._served[server] += nbytes
        moved = np.full(nodes, float(nbytes))
        moved[server] *= nodes - 1
        self._free = np.maximum(self._free, ready) + moved * self._costs.byte_s
        return np.full(nodes, self._free.max() + 2 * self._costs.latency_s)
