"""Our all_reduce on simulated nodes: the times at which each node has a bucket's sum.

``Costs`` determines the time of a hop and of a segment, ``choose`` the plan, and ``levels``, which
jobs use as well, the dependencies between nodes.

Segments are not simulated one by one. A segment completes hop h on a node when all members of the
level have sent theirs and the previous segment has completed hop h:

    t[segment, h] = max(max over members of t[segment, h - 1] + hop, t[segment - 1, h] + stage)

A stage takes the same time in every hop. The last segment therefore completes hop h one hop after
the level's last member completed hop h - 1 with *its* last segment. That is exact for any number of
segments.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sdp_plugins.core.internode.agreement import rounds
from sdp_plugins.core.internode.algorithm_choice import choose
from sdp_plugins.core.internode.cost_model import Costs
from sdp_plugins.core.internode.plan import Algorithm, Plan, levels

Times = NDArray[np.float64]
"""Times of every node, in seconds."""


@lru_cache(maxsize=64)
def groups(plan: Plan) -> tuple[NDArray[np.intp], ...]:
    """Return the exchanging nodes of every level: one row for each group."""
    found: list[list[tuple[int, ...]]] = [[] for _ in plan.radices]
    placed = [np.zeros(plan.nodes, np.bool_) for _ in plan.radices]
    for node in range(plan.nodes):
        if all(seen[node] for seen in placed):
            continue  # in groups found from other nodes
        for level, rows, seen in zip(levels(plan, node, 0), found, placed, strict=True):
            if not seen[node]:
                rows.append(level.members)
                seen[list(level.members)] = True
    return tuple(np.array(rows, np.intp) for rows in found)


def meet(times: Times, members: NDArray[np.intp]) -> Times:
    """Return when all members of each node's group have arrived."""
    last = times[members].max(axis=1, keepdims=True)
    met = np.empty_like(times)
    met[members] = last
    return met


def agreement_s(costs: Costs, nodes: int) -> float:
    """Return the seconds for the nodes' first ranks to exchange which operation was called."""
    messages = [len(blocks) for blocks in rounds(nodes)]
    return sum(costs.seconds(Plan(Algorithm.recursive_multiplying, (n + 1,)), 0) for n in messages)


def split_seconds(costs: Costs, plan: Plan, nbytes: int) -> tuple[float, float]:
    """Return the seconds that a bucket occupies a node's link, and those that each hop adds.

    Their sum over all hops is ``costs.seconds``. A swap waits for every hop, so its time consists
    of hops only.
    """
    busy_s = 0.0
    if plan.algorithm is Algorithm.sharded:
        segment = min(plan.segment_nbytes, nbytes)
        busy_s = costs.stage_s(plan, segment) * (nbytes / segment)
    return busy_s, (costs.seconds(plan, nbytes) - busy_s) / plan.hops


class Exchange:
    """The buckets that our all_reduce moves between the nodes, one after the other.

    With M nodes, S bytes and radices r1 ... rk: 2k hops and 2S(M-1)/M bytes over every link in each
    direction (an exchange), or k hops and S(r1 - 1 + ... + rk - 1) bytes (a swap), whichever takes
    less.

    Args:
        costs: The costs of the network and the nodes.
        nodes: Number of nodes, 2 or more.
    """

    def __init__(self, costs: Costs, nodes: int) -> None:
        self.costs = costs
        self._nodes = nodes
        self._agreement_s = agreement_s(costs, nodes)
        self._done: Times = np.zeros(nodes)
        """When every node has the sum of the previous bucket."""

    def plan(self, nbytes: int) -> Plan:
        """Return a bucket's plan: groups plan with the default costs, whatever their network."""
        return choose(Costs(), self._nodes, nbytes)

    def all_reduce(self, ready: Times, nbytes: int) -> Times:
        """Start the next bucket.

        Args:
            ready: When every node has its gradients.
            nbytes: Size of the bucket.

        Returns:
            When every node has the sum.
        """
        plan = self.plan(nbytes)
        hops = groups(plan)
        if plan.algorithm is Algorithm.sharded:
            hops += hops[::-1]  # the gather takes the scatter's hops in reverse
        busy_s, hop_s = split_seconds(self.costs, plan, nbytes)
        done = np.maximum(ready, self._done) + self._agreement_s + busy_s
        for members in hops:
            done = meet(done, members) + hop_s
        self._done = done
        return done
