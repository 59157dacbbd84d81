"""What our all_reduce is compared with on simulated nodes: a ring, and servers of whole tensors.

Both are given more than they would get: neither pays for messages (``Costs.message_s``) nor for
adding up (``Costs.node_byte_s``), which our all_reduce does.
"""

from __future__ import annotations

import numpy as np

from benchmarks.predict.exchange import Times
from sdp_plugins.core.internode.costs import Costs
from sdp_plugins.core.internode.plan import Algorithm, Plan


class Ring:
    """One flat ring over all ranks, the ranks of a node side by side.

    With N ranks and S bytes: 2(N-1) hops, one after the other, and 2S(N-1)/N bytes over every link.
    The ring crosses each node's link once per direction, whatever the number of its ranks. A bucket
    starts when the one before has ended; the part that the slowest rank adds last still has all
    hops to go, so that everybody ends all hops after the slowest has started.

    Args:
        costs: What the network takes.
        nodes: How many there are.
        ranks_per_node: How many each has.
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
        """What one bucket takes once all ranks have it."""
        # A rank sends as much as a node would in a direct exchange among as many.
        sent = Plan(Algorithm.sharded, (self._ranks,)).sent(nbytes)
        local = (self._ranks - 1) * (self._ranks - self._nodes) / self._ranks
        hops_s = local * self._local_s + (self._ranks - 1 - local) * self._costs.latency_s
        return 2 * hops_s + sent * self._costs.byte_s

    def all_reduce(self, ready: Times, nbytes: int) -> Times:
        """When every node has the sum of the next bucket."""
        self._free_s = max(self._free_s, float(ready.max())) + self.seconds(nbytes)
        return np.full(self._nodes, self._free_s)


class Servers:
    """Parameter servers, one per node; each tensor is served as a whole.

    A tensor goes to the server that has been given the fewest bytes so far. With M nodes and S
    bytes, B of them on the busiest server: 2 hops, and in each direction of its node's link (M-1)B
    bytes as a server and S - B as a worker. Were all tensors split evenly (B = S/M) these would be
    the 2S(M-1)/M of a sharded reduction.

    What goes back shares no direction of the link with what comes in, and is not even made to wait
    for it: one tensor's way back is hidden behind another's way there. Servers thus do better here
    than in practice, where the last tensor has nothing to hide behind.

    Args:
        costs: What the network takes.
        nodes: How many there are.
    """

    def __init__(self, costs: Costs, nodes: int) -> None:
        self._costs = costs
        self._free = np.zeros(nodes)
        self._served = np.zeros(nodes)

    @property
    def imbalance(self) -> float:
        """Bytes of the busiest server over the mean of all."""
        return float(self._served.max() / self._served.mean())

    def all_reduce(self, ready: Times, nbytes: int) -> Times:
        """When every node has the sums of this tensor and of all before it."""
        nodes, server = len(self._served), int(self._served.argmin())
        self._served[server] += nbytes
        moved = np.full(nodes, float(nbytes))
        moved[server] *= nodes - 1
        self._free = np.maximum(self._free, ready) + moved * self._costs.byte_s
        return np.full(nodes, self._free.max() + 2 * self._costs.latency_s)
